// Elements of a tensor in memory order, the channel that each belongs to, and loops over both.
#pragma once

#include "group/tiles.h"
#include "halves.h"

namespace memtrain {

// `outer` times `middle` times `channels` runs of `inner` elements. A statistic serves `together`
// neighbouring channels of one of the `outer` parts.
struct Channels {
  int64_t outer, middle, channels, inner, together;
  int64_t row() const { return channels * inner; }
  int64_t span() const { return middle * row(); }
  int64_t numel() const { return outer * span(); }
  // Shorter runs are not worth a loop of their own: rows of them are read beside rows of numbers.
  bool short_runs() const {
    return middle > 1 && (inner < 8 || (inner < 32 && row() <= 8192));
  }
  // One outer part's rows serve all threads; of several, each thread has those of its own.
  bool share_rows() const { return short_runs() && outer == 1; }
  bool own_rows() const { return short_runs() && outer > 1; }
};

// The run that an element lies in, its channel, the first channel of its outer part, and its
// statistic: run after run without a division.
struct Run {
  const Channels& of;
  int64_t left;  // elements of it
  int64_t channel, base, row, statistic, within;

  Run(const Channels& shape, int64_t at)
      : of(shape),
        left(shape.inner - at % shape.inner),
        channel(at / shape.inner % shape.channels),
        base(at / shape.span() * shape.channels),
        row(at % shape.span() / shape.row()),
        statistic((base + channel) / shape.together),
        within(channel % shape.together) {}

  void next() {
    left = of.inner;
    if (++within == of.together) within = 0, ++statistic;
    if (++channel < of.channels) return;
    channel = 0;
    if (++row < of.middle) {
      statistic -= of.channels / of.together;
      return;
    }
    row = 0, base += of.channels;
  }
};

// Numbers of channels laid out as a part's elements are, a row at least, some rows where they are
// short.
struct Rows {
  int64_t size, part = -1;
  std::vector<float> numbers;

  Rows(const Channels& shape, int64_t kinds)
      : size(shape.row() * std::max<int64_t>(1, 256 / shape.row())), numbers(size * kinds) {}

  float* kind(int64_t k) { return numbers.data() + k * size; }

  // `number(c)` beside every element of channel c.
  template <typename Number>
  void fill(int64_t k, const Channels& shape, const Number& number) {
    float* to = kind(k);
    for (int64_t i = 0; i < size;)
      for (int64_t c = 0; c < shape.channels; ++c) {
        const float x = number(c);
        for (int64_t j = 0; j < shape.inner; ++j) to[i++] = x;
      }
  }
};

constexpr int64_t kTile = 4096;

// Whole groups, an even number of them: two share their draws.
MT_INLINE int64_t tile_of(int64_t group_size) {
  return std::max<int64_t>(kTile / group_size / 2 * 2, 2) * group_size;
}

// Calls `piece(from, n, base, place)` for the parts of [at, at + n) within which rows of numbers
// and elements go side by side; `fresh(part)` where another of the outer parts begins.
template <typename Fresh, typename Piece>
MT_INLINE void over_rows(const Channels& shape, int64_t at, int64_t n, Rows& rows,
                         const Fresh& fresh, const Piece& piece) {
  const int64_t span = shape.span();
  for (int64_t i = 0; i < n;) {
    const int64_t part = (at + i) / span, within = (at + i) % span, place = within % rows.size;
    if (part != rows.part) fresh(part);
    const int64_t some = std::min({rows.size - place, span - within, n - i});
    piece(i, some, place);
    i += some;
  }
}

template <typename Piece>
MT_INLINE void over_runs(const Channels& shape, int64_t at, int64_t n, const Piece& piece) {
  Run run(shape, at);
  for (int64_t i = 0; i < n;) {
    const int64_t some = std::min(run.left, n - i);
    piece(i, some, run);
    i += some;
    run.next();
  }
}

// How numbers of each type are read and written, one at a time: the loops around become vectors.
struct Float {
  typedef float Number;
  MT_INLINE float read(float x) { return x; }
  MT_INLINE float write(float x) { return x; }
};
struct Bfloat {
  typedef uint16_t Number;
  MT_INLINE float read(uint16_t x) { return from_bfloat(x); }
  MT_INLINE uint16_t write(float x) { return to_bfloat(x); }
};
struct Half {
  typedef uint16_t Number;
  MT_INLINE float read(uint16_t x) { return from_half(x); }
  MT_INLINE uint16_t write(float x) { return to_half(x); }
};

struct Space {
  std::vector<float> hat, group;
  std::vector<uint8_t> codes;
  Space(int64_t tile, int64_t size) : hat(tile), group(size), codes(size) {}
};

}  // namespace memtrain

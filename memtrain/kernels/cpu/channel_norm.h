// Elements of a tensor in memory order, and the channel that each belongs to.
#pragma once

#include "common.h"

namespace memtrain {

// `outer` times `middle` times `channels` runs of `inner` elements. A statistic serves `together`
// neighbouring channels of one of the `outer` parts.
struct Channels {
  int64_t outer, middle, channels, inner, together;
  int64_t row() const { return channels * inner; }
  int64_t span() const { return middle * row(); }
  int64_t numel() const { return outer * span(); }
  // Shorter runs are not worth a loop of their own: rows of them are read beside rows of numbers.
  bool short_runs() const { return inner < 32 && middle > 1; }
};

// The run that an element lies in, and the channel of a part that it belongs to: run after run
// without a division.
struct Run {
  const Channels& of;
  int64_t left;  // elements of it
  int64_t channel, base, row;

  Run(const Channels& shape, int64_t at)
      : of(shape),
        left(shape.inner - at % shape.inner),
        channel(at / shape.inner % shape.channels),
        base(at / shape.span() * shape.channels),
        row(at % shape.span() / shape.row()) {}

  void next() {
    left = of.inner;
    if (++channel < of.channels) return;
    channel = 0;
    if (++row < of.middle) return;
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

}  // namespace memtrain

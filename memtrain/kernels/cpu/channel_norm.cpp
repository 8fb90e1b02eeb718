// Norms over channels with the quantised normalised input (definition: kernels/channel_norm.py).
#include "channel_norm.h"
#include "group_tiles.h"
// Of its functions only those for single numbers are needed here.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "halves.h"
#pragma GCC diagnostic pop

namespace memtrain {

constexpr int64_t kTile = 4096, kLanes = 32;

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
    if (part != rows.part) fresh(rows.part = part);
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
    piece(i, some, run.base + run.channel);
    i += some;
    run.next();
  }
}

// How numbers of each type are read and written, one at a time: the loops around become vectors.
struct Float {
  typedef float Number;
  static inline __attribute__((always_inline)) float read(float x) { return x; }
  static inline __attribute__((always_inline)) float write(float x) { return x; }
};
struct Bfloat {
  typedef uint16_t Number;
  static inline __attribute__((always_inline)) float read(uint16_t x) {
    return float_of(uint32_t{x} << 16);
  }
  static inline __attribute__((always_inline)) uint16_t write(float x) { return to_bfloat(x); }
};
struct Half {
  typedef uint16_t Number;
  static inline __attribute__((always_inline)) float read(uint16_t x) { return from_half(x); }
  static inline __attribute__((always_inline)) uint16_t write(float x) { return to_half(x); }
};

struct Space {
  std::vector<float> hat, group;
  std::vector<uint8_t> codes;
  Space(int64_t tile, int64_t size) : hat(tile), group(size), codes(size) {}
};

struct Forward {
  const void* x;
  int64_t type;
  const float *mean, *rstd;
  Channels shape;
  Quantizer to;
};

template <typename T>
MT_INLINE void normalise(const Forward& job, int64_t at, int64_t n, Rows& rows,
                         float* __restrict hat) {
  const Channels& shape = job.shape;
  const int64_t of = shape.together;
  const auto* x = static_cast<const typename T::Number*>(job.x) + at;
  if (!shape.short_runs()) {
    over_runs(shape, at, n,
              [&](int64_t from, int64_t some, int64_t c) __attribute__((always_inline)) {
                const int64_t s = of == 1 ? c : c / of;
                const float m = job.mean[s], r = job.rstd[s];
                for (int64_t i = from; i < from + some; ++i) hat[i] = (T::read(x[i]) - m) * r;
              });
    return;
  }
  over_rows(
      shape, at, n, rows,
      [&](int64_t part) {
        const int64_t first = part * shape.channels;
        rows.fill(0, shape, [&](int64_t c) { return job.mean[(first + c) / of]; });
        rows.fill(1, shape, [&](int64_t c) { return job.rstd[(first + c) / of]; });
      },
      [&](int64_t from, int64_t some, int64_t place) __attribute__((always_inline)) {
        const float *m = rows.kind(0) + place, *r = rows.kind(1) + place;
        for (int64_t i = 0; i < some; ++i) hat[from + i] = (T::read(x[from + i]) - m[i]) * r[i];
      });
}

MT_CLONES static void quantize_range(const Forward& job, int64_t begin, int64_t end, int64_t tile,
                                     Rows& rows, Space& space) {
  float* hat = space.hat.data();
  for (int64_t at = begin; at < end; at += tile) {
    const int64_t n = std::min(tile, end - at);
    if (job.type == kFloat32) normalise<Float>(job, at, n, rows, hat);
    if (job.type == kBfloat16) normalise<Bfloat>(job, at, n, rows, hat);
    if (job.type == kFloat16) normalise<Half>(job, at, n, rows, hat);
    quantize_tile(hat, at / job.to.size, n, job.to, space.group.data(), space.codes.data());
  }
}

struct Backward {
  const void* dy;
  void* dx;
  int64_t type;
  const float *rstd, *weight;
  Channels shape;
  Quantizer from;

  float weight_of(int64_t c) const { return weight ? weight[c % shape.channels] : 1.0f; }
};

// The elements of [begin, end) that lie in one tile, and x_hat of them.
struct Piece {
  const float* hat;
  int64_t at, n;
};

MT_INLINE Piece piece_of(const Backward& job, int64_t tile, int64_t begin, int64_t end,
                         Space& space) {
  const int64_t size = job.from.size, at = std::max(tile, begin), first = at / size;
  const int64_t stop = std::min(tile + static_cast<int64_t>(space.hat.size()), end);
  dequantize_tile(job.from, first, (stop + size - 1) / size, space.hat.data());
  return {space.hat.data() + at - first * size, at, stop - at};
}

constexpr int64_t kFloatRows = 64;  // rows added in float32, before float64

// Sums beside the elements of rows, and how many elements they have taken.
struct Totals {
  std::vector<float> both;
  int64_t taken = 0;
};

template <typename T>
MT_INLINE void add_rows(const Backward& job, const Piece& p, Rows& rows, Totals& totals) {
  const auto* dy = static_cast<const typename T::Number*>(job.dy) + p.at;
  over_rows(
      job.shape, p.at, p.n, rows, [](int64_t) {},
      [&](int64_t from, int64_t some, int64_t place) __attribute__((always_inline)) {
        const float* h = p.hat + from;
        float* __restrict a = totals.both.data() + place;
        float* __restrict b = a + rows.size;
        for (int64_t i = 0; i < some; ++i) {
          const float g = T::read(dy[from + i]);
          a[i] += g;
          b[i] += g * h[i];
        }
      });
  totals.taken += p.n;
}

template <typename T>
MT_INLINE void add_runs(const Backward& job, const Piece& p, int64_t base, int64_t stride,
                        double* sums) {
  const auto* dy = static_cast<const typename T::Number*>(job.dy) + p.at;
  over_runs(job.shape, p.at, p.n,
            [&](int64_t from, int64_t some, int64_t c) __attribute__((always_inline)) {
              const float* h = p.hat + from;
              float a[kLanes], b[kLanes];
              for (int64_t k = 0; k < kLanes; ++k) a[k] = b[k] = 0.0f;
              const int64_t whole = some / kLanes * kLanes;
              for (int64_t i = 0; i < whole; i += kLanes)
                for (int64_t k = 0; k < kLanes; ++k) {
                  const float g = T::read(dy[from + i + k]);
                  a[k] += g;
                  b[k] += g * h[i + k];
                }
              for (int64_t i = whole; i < some; ++i) {
                const float g = T::read(dy[from + i]);
                a[i - whole] += g;
                b[i - whole] += g * h[i];
              }
              for (int64_t width = kLanes / 2; width; width /= 2)
                for (int64_t k = 0; k < width; ++k) a[k] += a[k + width], b[k] += b[k + width];
              sums[c - base] += a[0];
              sums[c - base + stride] += b[0];
            });
}

// Adds the sums of dy and of dy * x_hat over [begin, end), elements of one outer part or of whole
// runs, to sums[c] and sums[c + stride] of the channels, the first of which is number `base`.
MT_CLONES static void sum_range(const Backward& job, int64_t begin, int64_t end, int64_t base,
                                int64_t stride, double* sums, Space& space) {
  const Channels& shape = job.shape;
  const int64_t step = static_cast<int64_t>(space.hat.size());
  Rows rows(shape, 0);
  Totals totals{std::vector<float>(shape.short_runs() ? 2 * rows.size : 0)};
  for (int64_t tile = begin / step * step; tile < end; tile += step) {
    const Piece p = piece_of(job, tile, begin, end, space);
    if (!shape.short_runs()) {
      if (job.type == kFloat32) add_runs<Float>(job, p, base, stride, sums);
      if (job.type == kBfloat16) add_runs<Bfloat>(job, p, base, stride, sums);
      if (job.type == kFloat16) add_runs<Half>(job, p, base, stride, sums);
      continue;
    }
    if (job.type == kFloat32) add_rows<Float>(job, p, rows, totals);
    if (job.type == kBfloat16) add_rows<Bfloat>(job, p, rows, totals);
    if (job.type == kFloat16) add_rows<Half>(job, p, rows, totals);
    if (totals.taken < kFloatRows * rows.size && tile + step < end) continue;
    for (int64_t i = 0; i < rows.size;)
      for (int64_t c = 0; c < shape.channels; ++c)
        for (int64_t j = 0; j < shape.inner; ++j, ++i) {
          sums[c] += totals.both[i];
          sums[c + stride] += totals.both[i + rows.size];
        }
    std::fill(totals.both.begin(), totals.both.end(), 0.0f);
    totals.taken = 0;
  }
}

// What the channels of a statistic share: dx = rstd * weight * dy + (slope * x_hat + shift).
struct Lines {
  std::vector<float> slope, shift;
};

template <typename T>
MT_INLINE void gradient(const Backward& job, const Lines& lines, const Piece& p, Rows& rows) {
  const Channels& shape = job.shape;
  const int64_t of = shape.together;
  const auto* dy = static_cast<const typename T::Number*>(job.dy) + p.at;
  auto* __restrict dx = static_cast<typename T::Number*>(job.dx) + p.at;
  if (!shape.short_runs()) {
    over_runs(shape, p.at, p.n,
              [&](int64_t from, int64_t some, int64_t c) __attribute__((always_inline)) {
                const int64_t s = of == 1 ? c : c / of;
                const float a = job.rstd[s] * job.weight_of(c);
                const float b = lines.slope[s], d = lines.shift[s];
                for (int64_t i = from; i < from + some; ++i)
                  dx[i] = T::write(a * T::read(dy[i]) + (b * p.hat[i] + d));
              });
    return;
  }
  over_rows(
      shape, p.at, p.n, rows,
      [&](int64_t part) {
        const int64_t first = part * shape.channels;
        rows.fill(0, shape, [&](int64_t c) {
          return job.rstd[(first + c) / of] * job.weight_of(c);
        });
        rows.fill(1, shape, [&](int64_t c) { return lines.slope[(first + c) / of]; });
        rows.fill(2, shape, [&](int64_t c) { return lines.shift[(first + c) / of]; });
      },
      [&](int64_t from, int64_t some, int64_t place) __attribute__((always_inline)) {
        const float *a = rows.kind(0) + place, *b = rows.kind(1) + place, *d = rows.kind(2) + place;
        for (int64_t i = 0; i < some; ++i)
          dx[from + i] =
              T::write(a[i] * T::read(dy[from + i]) + (b[i] * p.hat[from + i] + d[i]));
      });
}

MT_CLONES static void gradient_range(const Backward& job, const Lines& lines, int64_t begin,
                                     int64_t end, Rows& rows, Space& space) {
  const int64_t step = static_cast<int64_t>(space.hat.size());
  for (int64_t tile = begin; tile < end; tile += step) {
    const Piece p = piece_of(job, tile, begin, end, space);
    if (job.type == kFloat32) gradient<Float>(job, lines, p, rows);
    if (job.type == kBfloat16) gradient<Bfloat>(job, lines, p, rows);
    if (job.type == kFloat16) gradient<Half>(job, lines, p, rows);
  }
}

// Every run has a channel of its own: some runs to a thread.
static void sums_of_runs(const Backward& job, int64_t tile, int64_t threads, double* sums) {
  const Channels& shape = job.shape;
  const int64_t runs = shape.outer * shape.channels;
  parallel_for(runs, std::max<int64_t>(1, 32768 / shape.inner), threads,
               [&](int64_t begin, int64_t end) {
                 Space space(tile, job.from.size);
                 sum_range(job, begin * shape.inner, end * shape.inner, begin, runs, sums + begin,
                           space);
               });
}

// Parts of an outer part, the same for any number of threads, have sums for all its channels: at
// most a sixteenth of the bytes that they read.
static void sums_of_parts(const Backward& job, int64_t tile, int64_t threads, double* sums) {
  const Channels& shape = job.shape;
  const int64_t span = shape.span(), width = shape.channels, all = shape.outer * width;
  const int64_t least = std::max({int64_t{32768}, 64 * width, span / 64});
  const int64_t each = std::max<int64_t>(1, span / least), parts = each * shape.outer;
  std::vector<double> partial(2 * width * parts);
  parallel_for(parts, std::max<int64_t>(1, 32768 / (span / each)), threads,
               [&](int64_t begin, int64_t end) {
                 Space space(tile, job.from.size);
                 for (int64_t p = begin; p < end; ++p) {
                   const int64_t outer = p / each, k = p % each;
                   sum_range(job, outer * span + span * k / each,
                             outer * span + span * (k + 1) / each, outer * width, width,
                             partial.data() + 2 * width * p, space);
                 }
               });
  for (int64_t p = 0; p < parts; ++p)
    for (int64_t c = 0; c < width; ++c) {
      sums[p / each * width + c] += partial[2 * width * p + c];
      sums[all + p / each * width + c] += partial[2 * width * p + width + c];
    }
}

// The mean of g = dy * weight and that of g * x_hat, of the channels of each statistic.
static Lines lines_of(const Backward& job, const double* sums) {
  const Channels& shape = job.shape;
  const int64_t all = shape.outer * shape.channels, of = shape.together;
  const double count = static_cast<double>(shape.middle * shape.inner * of);
  Lines lines{std::vector<float>(all / of), std::vector<float>(all / of)};
  for (int64_t s = 0; s < all / of; ++s) {
    double first = 0.0, second = 0.0;
    for (int64_t c = s * of; c < (s + 1) * of; ++c) {
      const double w = job.weight_of(c);
      first += w * sums[c], second += w * sums[all + c];
    }
    lines.slope[s] = static_cast<float>(-job.rstd[s] * second / count);
    lines.shift[s] = static_cast<float>(-job.rstd[s] * first / count);
  }
  return lines;
}

}  // namespace memtrain

MT_EXPORT void mt_channel_norm_quantize(const void* x, int64_t type, const float* mean,
                                        const float* rstd, uint8_t* codes, void* bounds,
                                        int64_t wide, int64_t outer, int64_t middle,
                                        int64_t channels, int64_t inner, int64_t together,
                                        int64_t bits, int64_t group_size, int64_t seed,
                                        int64_t stochastic, int64_t threads) {
  using namespace memtrain;
  const Forward job{x, type, mean, rstd, {outer, middle, channels, inner, together},
                    {codes, bounds, wide, bits, group_size, seed, stochastic}};
  const int64_t n = job.shape.numel(), tile = tile_of(group_size);
  parallel_for((n + tile - 1) / tile, std::max<int64_t>(32768 / tile, 1), threads,
               [&](int64_t begin, int64_t end) {
                 Rows rows(job.shape, job.shape.short_runs() ? 2 : 0);
                 Space space(tile, group_size);
                 quantize_range(job, begin * tile, std::min(end * tile, n), tile, rows, space);
               });
}

// dx (none where it is null), and the sums over all of dy and of dy * x_hat of each channel.
MT_EXPORT void mt_channel_norm_backward(const void* dy, void* dx, int64_t type, uint8_t* codes,
                                        void* bounds, int64_t wide, const float* rstd,
                                        const float* weight, float* dbias, float* dweight,
                                        int64_t outer, int64_t middle, int64_t channels,
                                        int64_t inner, int64_t together, int64_t bits,
                                        int64_t group_size, int64_t threads) {
  using namespace memtrain;
  const Backward job{dy, dx, type, rstd, weight, {outer, middle, channels, inner, together},
                     {codes, bounds, wide, bits, group_size, 0, 0}};
  const int64_t n = job.shape.numel(), tile = tile_of(group_size), all = outer * channels;
  std::vector<double> sums(2 * all);
  (middle == 1 ? sums_of_runs : sums_of_parts)(job, tile, threads, sums.data());
  for (int64_t c = 0; c < channels; ++c) {
    double first = 0.0, second = 0.0;
    for (int64_t s = c; s < all; s += channels) first += sums[s], second += sums[all + s];
    dbias[c] = static_cast<float>(first), dweight[c] = static_cast<float>(second);
  }
  if (dx == nullptr) return;
  const Lines lines = lines_of(job, sums.data());
  parallel_for((n + tile - 1) / tile, std::max<int64_t>(32768 / tile, 1), threads,
               [&](int64_t begin, int64_t end) {
                 Rows rows(job.shape, job.shape.short_runs() ? 3 : 0);
                 Space space(tile, group_size);
                 gradient_range(job, lines, begin * tile, std::min(end * tile, n), rows, space);
               });
}

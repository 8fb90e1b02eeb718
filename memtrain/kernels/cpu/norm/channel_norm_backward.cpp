// From codes and an output's gradient to the gradients of a norm over channels (definition:
// kernels/norm/channel_norm.py).
#include "norm/channel_norm.h"

namespace memtrain {

struct Backward {
  const void* dy;
  void* dx;
  int64_t type;
  const float *rstd, *weight;
  Channels shape;
  Quantizer from;

  float weight_of(int64_t channel) const { return weight ? weight[channel] : 1.0f; }
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
  std::vector<float> all;
  int64_t taken = 0;
};

template <typename T>
MT_INLINE void add_rows(const Backward& job, const Piece& p, Rows& rows, Totals& totals) {
  const auto* dy = static_cast<const typename T::Number*>(job.dy) + p.at;
  over_rows(
      job.shape, p.at, p.n, rows, [](int64_t) {},
      [&](int64_t from, int64_t some, int64_t place) __attribute__((always_inline)) {
        const float* h = p.hat + from;
        float* __restrict a = totals.all.data() + place;
        float* __restrict b = a + rows.size;
        float* __restrict c = b + rows.size;
        for (int64_t i = 0; i < some; ++i) {
          const float g = T::read(dy[from + i]);
          a[i] += g;
          b[i] += g * h[i];
          c[i] += h[i];
        }
      });
  totals.taken += p.n;
}

// `kLanes` running sums, which are then added by halves: few for short runs.
template <typename T, int64_t kLanes>
MT_INLINE void add_some_runs(const Backward& job, const Piece& p, int64_t base, int64_t stride,
                             double* sums) {
  const auto* dy = static_cast<const typename T::Number*>(job.dy) + p.at;
  over_runs(job.shape, p.at, p.n,
            [&](int64_t from, int64_t some, const Run& run) __attribute__((always_inline)) {
              const float* h = p.hat + from;
              double* to = sums + (run.base + run.channel - base);
              float a[kLanes], b[kLanes], c[kLanes];
              for (int64_t k = 0; k < kLanes; ++k) a[k] = b[k] = c[k] = 0.0f;
              const int64_t whole = some / kLanes * kLanes;
              for (int64_t i = 0; i < whole; i += kLanes)
                for (int64_t k = 0; k < kLanes; ++k) {
                  const float g = T::read(dy[from + i + k]);
                  a[k] += g;
                  b[k] += g * h[i + k];
                  c[k] += h[i + k];
                }
              for (int64_t i = whole; i < some; ++i) {
                const float g = T::read(dy[from + i]);
                a[i - whole] += g;
                b[i - whole] += g * h[i];
                c[i - whole] += h[i];
              }
              for (int64_t width = kLanes / 2; width; width /= 2)
                for (int64_t k = 0; k < width; ++k)
                  a[k] += a[k + width], b[k] += b[k + width], c[k] += c[k + width];
              to[0] += a[0];
              to[stride] += b[0];
              to[2 * stride] += c[0];
            });
}

template <typename T>
MT_INLINE void add_runs(const Backward& job, const Piece& p, int64_t base, int64_t stride,
                        double* sums) {
  if (job.shape.inner < 128)
    add_some_runs<T, 16>(job, p, base, stride, sums);
  else
    add_some_runs<T, 32>(job, p, base, stride, sums);
}

// Adds the sums of dy, of dy * x_hat and of x_hat over [begin, end), elements of one outer part or of
// whole runs, to sums[c + k * stride] of the channels, the first of which is number `base`.
MT_CLONES static void sum_range(const Backward& job, int64_t begin, int64_t end, int64_t base,
                                int64_t stride, double* sums, Space& space) {
  const Channels& shape = job.shape;
  const int64_t step = static_cast<int64_t>(space.hat.size());
  Rows rows(shape, 0);
  Totals totals{std::vector<float>(shape.short_runs() ? 3 * rows.size : 0)};
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
        for (int64_t j = 0; j < shape.inner; ++j, ++i)
          for (int64_t k = 0; k < 3; ++k) sums[c + k * stride] += totals.all[i + k * rows.size];
    std::fill(totals.all.begin(), totals.all.end(), 0.0f);
    totals.taken = 0;
  }
}

// What the channels of a statistic share: dx = rstd * weight * dy + (slope * x_hat + shift).
struct Lines {
  std::vector<float> slope, shift;
};

// Fills rows with the lines of one of the outer parts.
static void fill_rows(const Backward& job, const Lines& lines, Rows& rows, int64_t part) {
  const int64_t first = part * job.shape.channels, of = job.shape.together;
  rows.part = part;
  rows.fill(0, job.shape,
            [&](int64_t c) { return job.rstd[(first + c) / of] * job.weight_of(c); });
  rows.fill(1, job.shape, [&](int64_t c) { return lines.slope[(first + c) / of]; });
  rows.fill(2, job.shape, [&](int64_t c) { return lines.shift[(first + c) / of]; });
}

template <typename T>
MT_INLINE void gradient(const Backward& job, const Lines& lines, const Piece& p, Rows& rows) {
  const Channels& shape = job.shape;
  const auto* dy = static_cast<const typename T::Number*>(job.dy) + p.at;
  auto* __restrict dx = static_cast<typename T::Number*>(job.dx) + p.at;
  if (!shape.short_runs()) {
    over_runs(shape, p.at, p.n,
              [&](int64_t from, int64_t some, const Run& run) __attribute__((always_inline)) {
                const int64_t s = run.statistic;
                const float a = job.rstd[s] * job.weight_of(run.channel);
                const float b = lines.slope[s], d = lines.shift[s];
                for (int64_t i = from; i < from + some; ++i)
                  dx[i] = T::write(a * T::read(dy[i]) + (b * p.hat[i] + d));
              });
    return;
  }
  over_rows(
      shape, p.at, p.n, rows,
      [&](int64_t part) { fill_rows(job, lines, rows, part); },
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
  const int64_t least = std::max({int64_t{32768}, 96 * width, span / 64});
  const int64_t each = std::max<int64_t>(1, span / least), parts = each * shape.outer;
  std::vector<double> partial(3 * width * parts);
  parallel_for(parts, std::max<int64_t>(1, 32768 / (span / each)), threads,
               [&](int64_t begin, int64_t end) {
                 Space space(tile, job.from.size);
                 for (int64_t p = begin; p < end; ++p) {
                   const int64_t outer = p / each, k = p % each;
                   sum_range(job, outer * span + span * k / each,
                             outer * span + span * (k + 1) / each, outer * width, width,
                             partial.data() + 3 * width * p, space);
                 }
               });
  for (int64_t p = 0; p < parts; ++p)
    for (int64_t k = 0; k < 3; ++k)
      for (int64_t c = 0; c < width; ++c)
        sums[k * all + p / each * width + c] += partial[(3 * p + k) * width + c];
}

// From sums of dy * x_hat and of x_hat those of dy * (x_hat - mean), and the means in the place of the
// statistics' first channels: x_hat has a mean of 0, what its codes have is their noise.
static void centre(const Channels& shape, double* sums) {
  const int64_t all = shape.outer * shape.channels, of = shape.together;
  const double count = static_cast<double>(shape.middle * shape.inner * of);
  for (int64_t s = 0; s < all / of; ++s) {
    double mean = 0.0;
    for (int64_t c = s * of; c < (s + 1) * of; ++c) mean += sums[2 * all + c];
    mean /= count;
    for (int64_t c = s * of; c < (s + 1) * of; ++c) sums[all + c] -= mean * sums[c];
    sums[2 * all + s * of] = mean;
  }
}

// Of g = dy * weight the mean and that of g * (x_hat - mean), of the channels of each statistic.
static Lines lines_of(const Backward& job, const double* sums) {
  const Channels& shape = job.shape;
  const int64_t all = shape.outer * shape.channels, of = shape.together;
  const double count = static_cast<double>(shape.middle * shape.inner * of);
  Lines lines{std::vector<float>(all / of), std::vector<float>(all / of)};
  for (int64_t s = 0; s < all / of; ++s) {
    double first = 0.0, second = 0.0;
    for (int64_t c = s * of; c < (s + 1) * of; ++c) {
      const double w = job.weight_of(c % shape.channels);
      first += w * sums[c], second += w * sums[all + c];
    }
    const double slope = -job.rstd[s] * second / count, mean = sums[2 * all + s * of];
    lines.slope[s] = static_cast<float>(slope);
    lines.shift[s] = static_cast<float>(-job.rstd[s] * first / count - slope * mean);
  }
  return lines;
}

}  // namespace memtrain

// dx (none where it is null), and the sums over all of dy and of dy * (x_hat - mean) of each channel.
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
  std::vector<double> sums(3 * all);
  (middle == 1 ? sums_of_runs : sums_of_parts)(job, tile, threads, sums.data());
  centre(job.shape, sums.data());
  for (int64_t c = 0; c < channels; ++c) {
    double first = 0.0, second = 0.0;
    for (int64_t s = c; s < all; s += channels) first += sums[s], second += sums[all + s];
    dbias[c] = static_cast<float>(first), dweight[c] = static_cast<float>(second);
  }
  if (dx == nullptr) return;
  const Lines lines = lines_of(job, sums.data());
  Rows shared(job.shape, job.shape.share_rows() ? 3 : 0);
  if (job.shape.share_rows()) fill_rows(job, lines, shared, 0);
  parallel_for((n + tile - 1) / tile, std::max<int64_t>(32768 / tile, 1), threads,
               [&](int64_t begin, int64_t end) {
                 Rows own(job.shape, job.shape.own_rows() ? 3 : 0);
                 Rows& rows = job.shape.own_rows() ? own : shared;
                 Space space(tile, group_size);
                 gradient_range(job, lines, begin * tile, std::min(end * tile, n), rows, space);
               });
}

// From a norm's input and its statistics to codes (definition: kernels/norm/channel_norm.py).
#include "norm/channel_norm.h"

namespace memtrain {

struct Forward {
  const void* x;
  int64_t type;
  const float *mean, *rstd;
  Channels shape;
  Quantizer to;
};

// Fills rows with the statistics of one of the outer parts.
static void fill_rows(const Forward& job, Rows& rows, int64_t part) {
  const int64_t first = part * job.shape.channels, of = job.shape.together;
  rows.part = part;
  rows.fill(0, job.shape, [&](int64_t c) { return job.mean[(first + c) / of]; });
  rows.fill(1, job.shape, [&](int64_t c) { return job.rstd[(first + c) / of]; });
}

template <typename T>
MT_INLINE void normalise(const Forward& job, int64_t at, int64_t n, Rows& rows,
                         float* __restrict hat) {
  const Channels& shape = job.shape;
  const auto* x = static_cast<const typename T::Number*>(job.x) + at;
  if (!shape.short_runs()) {
    over_runs(shape, at, n,
              [&](int64_t from, int64_t some, const Run& run) __attribute__((always_inline)) {
                const float m = job.mean[run.statistic], r = job.rstd[run.statistic];
                for (int64_t i = from; i < from + some; ++i) hat[i] = (T::read(x[i]) - m) * r;
              });
    return;
  }
  over_rows(
      shape, at, n, rows, [&](int64_t part) { fill_rows(job, rows, part); },
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
  Rows shared(job.shape, job.shape.share_rows() ? 2 : 0);
  if (job.shape.share_rows() && n) fill_rows(job, shared, 0);
  parallel_for((n + tile - 1) / tile, std::max<int64_t>(32768 / tile, 1), threads,
               [&](int64_t begin, int64_t end) {
                 Rows own(job.shape, job.shape.own_rows() ? 2 : 0);
                 Rows& rows = job.shape.own_rows() ? own : shared;
                 Space space(tile, group_size);
                 quantize_range(job, begin * tile, std::min(end * tile, n), tile, rows, space);
               });
}

// Layer and RMS norm with the quantised normalised input (definition: kernels/norm/norm.py).
#include <cmath>
#include <cstring>

#include "group/group.h"
#include "halves.h"

namespace memtrain {

constexpr int64_t kLanes = 32, kTile = 4096;

// Arguments, in the order of `_norm` in norm.py.
struct Norm {
  const void* x;
  int64_t bf16;
  const float *weight, *bias;
  void* y;
  float* rstd;
  int64_t rows, size;
  double eps;
  int64_t centred, narrow;
  Quantizer to;
  int64_t threads;
};

MT_INLINE float halves(float* lanes) {
  for (int64_t width = kLanes / 2; width; width /= 2)
    for (int64_t c = 0; c < width; ++c) lanes[c] += lanes[c + width];
  return lanes[0];
}

// The sum of x - mean, or of its square.
template <bool kSquare>
MT_INLINE float sum(const float* x, int64_t size, float mean) {
  float lanes[kLanes];
  for (int64_t c = 0; c < kLanes; ++c) lanes[c] = 0.0f;
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t c = 0; c < kLanes; ++c) {
      const float d = x[i + c] - mean;
      lanes[c] += kSquare ? d * d : d;
    }
  for (int64_t i = whole; i < size; ++i) {
    const float d = x[i] - mean;
    lanes[i - whole] += kSquare ? d * d : d;
  }
  return halves(lanes);
}

// One row: x_hat to `hat`, its value to y.
MT_INLINE void normalise(const Norm& job, int64_t row, float* hat) {
  const int64_t n = job.size, at = row * n;
  if (job.bf16) {
    const uint16_t* from = static_cast<const uint16_t*>(job.x) + at;
    for (int64_t i = 0; i < n; ++i) hat[i] = from_bfloat(from[i]);
  }
  const float* x = job.bf16 ? hat : static_cast<const float*>(job.x) + at;
  const float size = static_cast<float>(n);
  const float mean = job.centred ? sum<false>(x, n, 0.0f) / size : 0.0f;
  const float rstd = 1.0f / std::sqrt(sum<true>(x, n, mean) / size + static_cast<float>(job.eps));
  job.rstd[row] = rstd;
  if (job.bf16)  // in place, which the compiler must know
    for (int64_t i = 0; i < n; ++i) hat[i] = (hat[i] - mean) * rstd;
  else
    for (int64_t i = 0; i < n; ++i) hat[i] = (x[i] - mean) * rstd;
  const float *__restrict w = job.weight, *__restrict b = job.bias;
  if (!job.bf16) {
    float* __restrict y = static_cast<float*>(job.y) + at;
    for (int64_t i = 0; i < n; ++i) y[i] = hat[i] * w[i] + b[i];
    return;
  }
  uint16_t* __restrict y = static_cast<uint16_t*>(job.y) + at;
  if (job.narrow)
    for (int64_t i = 0; i < n; ++i) y[i] = to_bfloat(from_bfloat(to_bfloat(hat[i])) * w[i] + b[i]);
  else
    for (int64_t i = 0; i < n; ++i) y[i] = to_bfloat(hat[i] * w[i] + b[i]);
}

// Rows of some tiles: what a tile's rows have made is quantised while it is in the nearest cache.
MT_CLONES static void norm_range(const Norm& job, int64_t begin, int64_t end, int64_t tile,
                                 float* hat, Scratch& scratch) {
  const int64_t groups = job.size / job.to.size;
  for (int64_t row = begin; row < end; row += tile) {
    const int64_t stop = std::min(row + tile, end);
    for (int64_t r = row; r < stop; ++r) normalise(job, r, hat + (r - row) * job.size);
    quantize_groups(hat, row * groups, stop * groups, job.to, scratch);
  }
}

}  // namespace memtrain

MT_EXPORT void mt_norm_quantize(const memtrain::Norm* call) {
  const memtrain::Norm job = *call;
  // An even number of rows: two groups share their draws.
  const int64_t tile = std::max<int64_t>(memtrain::kTile / job.size / 2 * 2, 2);
  const int64_t tiles = (job.rows + tile - 1) / tile;
  memtrain::parallel_for(
      tiles, std::max<int64_t>(32768 / (tile * job.size), 1), job.threads,
      [&](int64_t begin, int64_t end) {
        std::vector<float> hat(tile * job.size + 16);
        memtrain::Scratch scratch(job.to.size);
        memtrain::norm_range(job, begin * tile, std::min(end * tile, job.rows), tile, hat.data(),
                             scratch);
      });
}

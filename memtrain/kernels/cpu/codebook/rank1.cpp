// Rank-1 quantiser, 4 bits, a tensor seen as [rows, cols] (contract: kernels/codebook/rank1.py).
#ifndef MT_LANES
#define MT_SELF "codebook/rank1.cpp"
#include "foreach_isa.h"

namespace {
constexpr int64_t kBlock = 128, kGrain = 512;
}

MT_EXPORT void mt_rank1_quantize(const float* x, const float* row_inv, const float* col_inv,
                                 const float* table, uint8_t* codes, int64_t rows, int64_t cols,
                                 int64_t threads) {
  memtrain::parallel_for(
      (rows * cols + kBlock - 1) / kBlock, kGrain, threads, [=](int64_t begin, int64_t end) {
        MT_DISPATCH(quantize_blocks(x, row_inv, col_inv, table, codes, rows, cols, begin, end));
      });
}

MT_EXPORT void mt_rank1_dequantize(const uint8_t* codes, const float* row, const float* col,
                                   const float* table, float* out, int64_t rows, int64_t cols,
                                   int64_t threads) {
  memtrain::parallel_for(
      (rows * cols + kBlock - 1) / kBlock, kGrain, threads, [=](int64_t begin, int64_t end) {
        MT_DISPATCH(dequantize_blocks(codes, row, col, table, out, rows, cols, begin, end));
      });
}

#else

inline void quantize_blocks(const float* x, const float* row_inv, const float* col_inv,
                            const float* table, uint8_t* codes, int64_t rows, int64_t cols,
                            int64_t begin, int64_t end) {
  const Book book = scaled(table, 1.0f);
  float r[128], c[128], tail[128] = {};
  for (int64_t b = begin; b < end; ++b) {
    const float* in = x + b * 128;
    gather(row_inv, col_inv, b * 128, rows, cols, r, c);
    if ((b + 1) * 128 > rows * cols) {
      std::copy(in, x + rows * cols, tail);
      in = tail;
    }
    auto code = [&](int i) __attribute__((always_inline)) {
      const F inv = (F)imax((I)load(r + i), (I)load(c + i));
      return encode(book, load(in + i) * inv);
    };
    for (int i = 0; i < 64; i += 16)
      narrow(codes + b * 64 + i, code(i) | code(64 + i) << 4);
  }
}

inline void dequantize_blocks(const uint8_t* codes, const float* row, const float* col,
                              const float* table, float* out, int64_t rows, int64_t cols,
                              int64_t begin, int64_t end) {
  const F values = load(table);
  float r[128], c[128], tail[128];
  for (int64_t b = begin; b < end; ++b) {
    const bool last = (b + 1) * 128 > rows * cols;
    float* to = last ? tail : out + b * 128;
    gather(row, col, b * 128, rows, cols, r, c);
    for (int i = 0; i < 64; i += 16) {
      const I byte = widen(codes + b * 64 + i);
      const F low = (F)imin(magnitude(load(r + i)), magnitude(load(c + i)));
      const F high = (F)imin(magnitude(load(r + 64 + i)), magnitude(load(c + 64 + i)));
      store(to + i, decode(values, byte) * low);
      store(to + 64 + i, decode(values, byte >> 4) * high);
    }
    if (last) std::copy(to, to + (rows * cols - b * 128), out + b * 128);
  }
}

#endif

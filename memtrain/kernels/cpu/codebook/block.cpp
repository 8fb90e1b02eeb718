// Code book quantiser, 4 bits, one abs-max scale a block (contract: kernels/codebook/block.py).
#ifndef MT_LANES
#define MT_SELF "codebook/block.cpp"
#include "foreach_isa.h"

namespace {
int isa_limit = 2;
}

MT_EXPORT int mt_isa() {
#ifdef MT_X86
  static const int best = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                  __builtin_cpu_supports("avx512vl")
                              ? 2
                          : __builtin_cpu_supports("avx2") ? 1
                                                           : 0;
  return std::min(best, isa_limit);
#else
  return 0;
#endif
}

// Tests run the AVX2 and portable forms on an AVX-512 machine by it.
MT_EXPORT void mt_limit_isa(int64_t level, int64_t) { isa_limit = static_cast<int>(level); }

MT_EXPORT void mt_codebook_quantize(const float* x, const float* table, uint8_t* codes,
                                    float* scale, int64_t n, int64_t block, int64_t threads) {
  int64_t blocks = (n + block - 1) / block;
  memtrain::parallel_for(blocks, 65536 / block + 1, threads, [=](int64_t begin, int64_t end) {
    MT_DISPATCH(quantize_blocks(x, table, codes, scale, n, block, begin, end));
  });
}

MT_EXPORT void mt_codebook_dequantize(const uint8_t* codes, const float* scale, const float* table,
                                      float* out, int64_t n, int64_t block, int64_t threads) {
  int64_t blocks = (n + block - 1) / block;
  memtrain::parallel_for(blocks, 65536 / block + 1, threads, [=](int64_t begin, int64_t end) {
    MT_DISPATCH(dequantize_blocks(codes, scale, table, out, n, block, begin, end));
  });
}

#else

inline void quantize_blocks(const float* x, const float* table, uint8_t* codes, float* scale,
                            int64_t n, int64_t block, int64_t begin, int64_t end) {
  const int64_t half = block / 2;
  std::vector<float> padded(block);
  for (int64_t b = begin; b < end; ++b) {
    const float* in = x + b * block;
    if ((b + 1) * block > n) {
      std::fill(padded.begin(), padded.end(), 0.0f);
      std::copy(in, x + n, padded.begin());
      in = padded.data();
    }
    I top = {};
    for (int64_t i = 0; i < block; i += 16) top = imax(top, magnitude(load(in + i)));
    scale[b] = as_float(top_of(top));
    const Book book = scaled(table, scale[b]);
    for (int64_t i = 0; i < half; i += 16)
      narrow(codes + b * half + i,
             encode(book, load(in + i)) | encode(book, load(in + half + i)) << 4);
  }
}

inline void dequantize_blocks(const uint8_t* codes, const float* scale, const float* table,
                              float* out, int64_t n, int64_t block, int64_t begin, int64_t end) {
  const int64_t half = block / 2;
  const F values = load(table);
  std::vector<float> padded(block);
  for (int64_t b = begin; b < end; ++b) {
    const bool last = (b + 1) * block > n;
    float* to = last ? padded.data() : out + b * block;
    for (int64_t i = 0; i < half; i += 16) {
      const I byte = widen(codes + b * half + i);
      store(to + i, decode(values, byte) * scale[b]);
      store(to + half + i, decode(values, byte >> 4) * scale[b]);
    }
    if (last) std::copy(to, to + (n - b * block), out + b * block);
  }
}

#endif

// Codes of any codebook, 2 to 8 bits, to the nearest value or stochastically (contract:
// kernels/codebook/quantize.py, layout of codes: kernels/packing/bits.py).
#include "halves.h"
#include "packing/codes.h"
#include "philox.h"

#ifdef MT_X86  // GCC 12 writes no gathers by itself: tables are read by intrinsics
#include <immintrin.h>
#define MT_WIDE_ISA __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace memtrain {

constexpr int64_t kGrain = 32768;  // elements a thread takes at once
constexpr int kDraw = 16;          // positions that draw their random words together
// Between these a scale's reciprocal, and its products with bounds, are far from the ends.
constexpr float kLow = 0x1p-60f, kHigh = 0x1p60f;

// The bounds in ascending order, then +Inf. A number's sign and first bits name a bucket, `base`
// holds the bounds below the bucket, and at most one lies inside it.
struct Codebook {
  const float *bounds, *values;  // values: only of stochastic codes, whose bounds are values too
  const int32_t* base;
  int64_t shift, lowest, buckets, count, bits;
  bool wide;
};

// One call: blocks with a scale each, or 128 elements of a matrix with a vector of
// reciprocals for its rows and one for its columns.
struct Task {
  const float *x, *row, *col;
  uint8_t* codes;
  float *scale, *out;
  int64_t n, cols, block, seed;
};

template <bool STOCHASTIC>
MT_INLINE bool passes(float x, float bound) {
  return STOCHASTIC ? x >= bound : x > bound;
}

// How many bounds (times the scale) x passes.
template <bool STOCHASTIC>
MT_INLINE int32_t find(float x, float scale, float inverse, const Codebook& book) {
  const uint32_t bits = bits_of(x * inverse);
  int32_t key = static_cast<int32_t>((bits & 0x7FFFFFFF) >> book.shift);
  key -= static_cast<int32_t>(book.lowest);
  const int32_t last = static_cast<int32_t>(book.buckets) - 1;
  key = key > 0 ? key : 0;
  key = key < last ? key : last;
  key += bits >> 31 ? last + 1 : 0;
  const int32_t below = book.base[key];
  return below + passes<STOCHASTIC>(x, book.bounds[below] * scale);
}

template <bool STOCHASTIC>
MT_INLINE int32_t search(float x, float scale, const Codebook& book) {
  int32_t below = 0;
  for (int64_t k = 0; k < book.count; ++k)
    below += passes<STOCHASTIC>(x, book.bounds[k] * scale);
  return below;
}

#ifdef MT_X86
// `find` for sixteen at a time; NaN gives 0.
template <bool STOCHASTIC>
MT_WIDE_ISA static void find_wide(const float* __restrict x, uint8_t* __restrict codes,
                                  int64_t size, float scale, float inverse, const Codebook& book) {
  constexpr int kPasses = STOCHASTIC ? _CMP_GE_OQ : _CMP_GT_OQ;
  const __m128i shift = _mm_cvtsi64_si128(book.shift);
  const __m512i lowest = _mm512_set1_epi32(static_cast<int>(book.lowest));
  const __m512i last = _mm512_set1_epi32(static_cast<int>(book.buckets) - 1);
  const __m512i negative = _mm512_set1_epi32(static_cast<int>(book.buckets));
  const __m512 by = _mm512_set1_ps(scale), to_unit = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 in = static_cast<__mmask16>(size - i < 16 ? (1 << (size - i)) - 1 : 0xFFFF);
    const __m512 v = _mm512_maskz_loadu_ps(in, x + i);
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(v, to_unit));
    __m512i key = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    key = _mm512_sub_epi32(_mm512_srl_epi32(key, shift), lowest);
    key = _mm512_min_epi32(_mm512_max_epi32(key, _mm512_setzero_si512()), last);
    key = _mm512_mask_add_epi32(key, _mm512_movepi32_mask(bits), key, negative);
    __m512i code = _mm512_i32gather_epi32(key, book.base, 4);
    const __m512 bound = _mm512_mul_ps(_mm512_i32gather_ps(code, book.bounds, 4), by);
    const __mmask16 up = _mm512_cmp_ps_mask(v, bound, kPasses);
    code = _mm512_mask_add_epi32(code, up, code, _mm512_set1_epi32(1));
    code = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), code);
    _mm_mask_storeu_epi8(codes + i, in, _mm512_cvtepi32_epi8(code));
  }
}

MT_WIDE_ISA static void decode_wide(const uint8_t* __restrict codes, const float* values,
                                    float scale, float* __restrict out, int64_t n) {
  const __m512 by = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 in = static_cast<__mmask16>(n - i < 16 ? (1 << (n - i)) - 1 : 0xFFFF);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(in, codes + i));
    _mm512_mask_storeu_ps(out + i, in, _mm512_mul_ps(_mm512_i32gather_ps(code, values, 4), by));
  }
}
#endif

MT_INLINE uint8_t round_up(int32_t low, float x, float u, float scale, const Codebook& book) {
  const float from = book.values[low], gap = book.values[low + 1] - from;
  return static_cast<uint8_t>(low + (x > (from + u * gap) * scale));
}

// Codes of `size` elements, a byte each. `hard`: the reciprocal of the scale says too little.
template <bool STOCHASTIC>
MT_INLINE void encode(const float* __restrict x, uint8_t* __restrict codes, int64_t size,
                      float scale, const Codebook book) {
  const bool hard = !(scale >= kLow && scale <= kHigh);
  const float inverse = 1.0f / scale;
  if (hard) {
    for (int64_t i = 0; i < size; ++i)
      codes[i] = static_cast<uint8_t>(search<STOCHASTIC>(x[i], scale, book));
    return;
  }
#ifdef MT_X86
  if (book.wide) return find_wide<STOCHASTIC>(x, codes, size, scale, inverse, book);
#endif
  for (int64_t i = 0; i < size; ++i) {
    const int32_t code = find<STOCHASTIC>(x[i], scale, inverse, book);
    codes[i] = static_cast<uint8_t>(x[i] == x[i] ? code : 0);
  }
}

MT_INLINE void decode(const uint8_t* __restrict codes, const float* __restrict values, float scale,
                      float* __restrict out, int64_t n, bool wide) {
#ifdef MT_X86
  if (wide) return decode_wide(codes, values, scale, out, n);
#endif
  for (int64_t i = 0; i < n; ++i) out[i] = values[codes[i]] * scale;
}

// One code up where the random number says so: eight slices share their counters
// (kernels/random/philox.py).
MT_INLINE void draw(const float* __restrict x, uint8_t* __restrict codes, int64_t size,
                    uint32_t first, float scale, uint64_t seed, const Codebook book) {
  const int64_t width = size / 8;
  uint32_t words[4][kDraw];
  for (int64_t c = 0; c < width; c += kDraw) {
    philox_piece<kDraw>(first + static_cast<uint32_t>(c), seed, words);
    const int64_t left = width - c < kDraw ? width - c : kDraw;
    for (int s = 0; s < 8; ++s) {
      const float* from = x + s * width + c;
      uint8_t* to = codes + s * width + c;
      for (int64_t i = 0; i < left; ++i) {
        const uint32_t r = (words[s / 2][i] >> (s % 2 * 16)) & 0xFFFF;
        const float u = (static_cast<float>(static_cast<int32_t>(r)) + 0.5f) * 0x1p-16f;
        const uint8_t code = round_up(to[i], from[i], u, scale, book);
        to[i] = from[i] == from[i] ? code : uint8_t{0};
      }
    }
  }
}

// The rows' and the columns' scales of the `size` elements from `from` on (0 past the end),
// put together by `join`.
template <typename Join>
MT_INLINE void join_scales(const Task& task, int64_t from, int64_t size, float* __restrict to,
                          const Join& join) {
  const int64_t n = std::min(size, task.n - from);
  int64_t i = from / task.cols, j = from % task.cols;
  for (int64_t k = 0; k < n; ++i, j = 0) {
    const int64_t run = std::min(task.cols - j, n - k);
    const float row = task.row[i];
    const float* col = task.col + j;
    for (int64_t l = 0; l < run; ++l) to[k + l] = join(row, col[l]);
    k += run;
  }
  for (int64_t k = n; k < size; ++k) to[k] = 0.0f;
}

MT_INLINE float abs_max(const float* x, int64_t size) {
  int32_t top = 0;  // as integers: NaN is above Inf is above every number
  for (int64_t i = 0; i < size; ++i) {
    const int32_t m = static_cast<int32_t>(bits_of(x[i]) & 0x7FFFFFFF);
    top = m > top ? m : top;
  }
  return float_of(static_cast<uint32_t>(top));
}

MT_CLONES static void quantize_range(const Task& task, const Codebook& book, int64_t begin, int64_t end,
                                     float* buffer, uint8_t* codes) {
  const int64_t size = task.block;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t at = b * size, n = std::min(size, task.n - at);
    const float* x = task.x + at;
    if (task.row != nullptr) {
      join_scales(task, at, size, buffer, [](float r, float c) __attribute__((always_inline)) {
        return r > c ? r : c;
      });
      for (int64_t i = 0; i < n; ++i) buffer[i] *= x[i];
      x = buffer;
    } else if (n < size) {
      std::memset(buffer, 0, size * sizeof(float));
      std::memcpy(buffer, x, n * sizeof(float));
      x = buffer;
    }
    float scale = 1.0f;
    if (task.row == nullptr) scale = task.scale[b] = abs_max(x, size);
    uint8_t* out = task.codes + at / 8 * book.bits;
    uint8_t* to = book.bits == 8 ? out : codes;
    if (!(scale > 0.0f && scale <= 0x1.fffffep127f))
      std::memset(to, 0, size);
    else if (book.values != nullptr) {
      encode<true>(x, to, size, scale, book);
      draw(x, to, size, static_cast<uint32_t>(at / 8), scale, static_cast<uint64_t>(task.seed), book);
    } else {
      encode<false>(x, to, size, scale, book);
    }
    if (book.bits < 8) pack(codes, out, size, book.bits);
  }
}

MT_CLONES static void dequantize_range(const Task& task, const Codebook& book, int64_t begin,
                                       int64_t end, float* buffer, uint8_t* codes) {
  const int64_t size = task.block;
  const float* __restrict values = book.values;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t at = b * size, n = std::min(size, task.n - at);
    const uint8_t* in = task.codes + at / 8 * book.bits;
    if (book.bits < 8) unpack(in, codes, size, book.bits);
    const uint8_t* __restrict from = book.bits < 8 ? codes : in;
    float* __restrict out = task.out + at;
    if (task.row == nullptr) {
      decode(from, values, task.scale[b], out, n, book.wide);
      continue;
    }
    join_scales(task, at, size, buffer, [](float r, float c) __attribute__((always_inline)) {
      const uint32_t a = bits_of(r) & 0x7FFFFFFF, b = bits_of(c) & 0x7FFFFFFF;
      return float_of(a < b ? a : b);
    });
    for (int64_t i = 0; i < n; ++i) out[i] = values[from[i]] * buffer[i];
  }
}

template <typename Range>
void over_blocks(const Task& task, const Codebook& book, int64_t threads, const Range& range) {
  const int64_t blocks = (task.n + task.block - 1) / task.block;
  parallel_for(blocks, std::max<int64_t>(kGrain / task.block, 1), threads,
               [&](int64_t begin, int64_t end) {
                 std::vector<float> buffer(task.block);
                 std::vector<uint8_t> codes(task.block);
                 range(task, book, begin, end, buffer.data(), codes.data());
               });
}

}  // namespace memtrain

// `values`, null: to the nearest; else the 2**bits values, and the bounds are those but the
// lowest and the highest.
// `row` and `col`, null: blocks with a scale each; else the reciprocals of [rows], [cols].
MT_EXPORT void mt_codebook_quantize(const float* x, const float* row, const float* col,
                                const float* bounds, const float* values, const int32_t* base,
                                int64_t shift, int64_t lowest, int64_t buckets, int64_t count,
                                uint8_t* codes, float* scale, int64_t n, int64_t cols,
                                int64_t block, int64_t bits, int64_t seed, int64_t threads) {
  memtrain::Task task{x, row, col, codes, scale, nullptr, n, cols, block, seed};
  memtrain::Codebook book{bounds, values, base, shift, lowest, buckets, count, bits, mt_isa() >= 2};
  memtrain::over_blocks(task, book, threads, memtrain::quantize_range);
}

MT_EXPORT void mt_codebook_dequantize(const uint8_t* codes, const float* scale, const float* row,
                                  const float* col, const float* values, float* out, int64_t n,
                                  int64_t cols, int64_t block, int64_t bits, int64_t threads) {
  memtrain::Task task{nullptr, row, col, const_cast<uint8_t*>(codes), const_cast<float*>(scale),
                      out, n, cols, block, 0};
  memtrain::Codebook book{nullptr, values, nullptr, 0, 0, 0, 0, bits, mt_isa() >= 2};
  memtrain::over_blocks(task, book, threads, memtrain::dequantize_range);
}

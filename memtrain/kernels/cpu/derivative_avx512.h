// Few-bit codes of 1 to 4 bits with AVX-512: a permutation of sixteen lanes is a table look-up,
// which no loop makes the compiler see. Whole blocks only; layout and results as in derivative.cpp.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MT_DERIVATIVE_AVX512
#include <immintrin.h>

#include "common.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")

namespace memtrain::avx512 {
namespace {

// The first numbers of a table in one register, repeated until it is full.
template <int kCount>
MT_INLINE __m512i repeated(const void* table) {
  uint32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<const uint32_t*>(table)[i % kCount];
  return _mm512_loadu_si512(lanes);
}

// Boundaries for a search by halving: `at[k]` holds, at every place that the search can have
// reached, the boundary in the middle of what the next 2**k decides.
template <int kBits>
struct Boundaries {
  __m512 at[kBits];
  MT_INLINE Boundaries of(const float* boundary) {
    Boundaries b;
    float lanes[16];
    for (int k = 0; k < kBits; ++k) {
      for (int i = 0; i < 16; ++i) lanes[i] = boundary[(i | ((1 << k) - 1)) % ((1 << kBits) - 1)];
      b.at[k] = _mm512_loadu_ps(lanes);
    }
    return b;
  }
};

// The number of boundaries below x; NaN has none.
template <int kBits>
MT_INLINE __m512i code_of(__m512 x, const Boundaries<kBits>& b) {
  constexpr int kTop = 1 << (kBits - 1);
  const __m512 middle = _mm512_permutexvar_ps(_mm512_setzero_si512(), b.at[kBits - 1]);
  __m512i code = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(x, middle, _CMP_GT_OQ),
                                        _mm512_set1_epi32(kTop));
#pragma GCC unroll 4
  for (int k = kBits - 2; k >= 0; --k) {
    const __m512 next = _mm512_permutexvar_ps(code, b.at[k]);
    const __mmask16 above = _mm512_cmp_ps_mask(x, next, _CMP_GT_OQ);
    code = _mm512_mask_or_epi32(code, above, code, _mm512_set1_epi32(1 << k));
  }
  return code;
}

constexpr int lanes_of(int bits) { return bits == 4 ? 2 : bits == 2 ? 4 : 8; }

template <int kBits>
MT_INLINE void encode_blocks(const float* x, const float* boundaries, uint8_t* out,
                             int64_t blocks) {
  constexpr int kLanes = lanes_of(kBits), kWidth = 256 / kLanes, kBytes = kLanes * kBits / 8;
  const auto b = Boundaries<kBits>::of(boundaries);
  for (; blocks > 0; --blocks, x += 256, out += 32 * kBits)
    for (int c = 0; c < kWidth; c += 16) {
      __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) {
        const __m512i code = code_of<kBits>(_mm512_loadu_ps(x + lane * kWidth + c), b);
        word = _mm512_or_si512(word, _mm512_slli_epi32(code, kBits * lane));
      }
#pragma GCC unroll 3
      for (int byte = 0; byte < kBytes; ++byte)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + byte * kWidth + c),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(word, 8 * byte)));
    }
}

// One pass of backward's: a level, times a gradient or by itself, written as T.
struct Levels {
  using T = uint32_t;
  MT_INLINE void write(const T*, __m512 level, T* out) { _mm512_storeu_ps(out, level); }
};

struct Float32 {
  using T = float;
  MT_INLINE void write(const T* grad, __m512 level, T* out) {
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(grad), level));
  }
};

struct Bfloat16 {
  using T = uint16_t;
  MT_INLINE void write(const T* grad, __m512 level, T* out) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(grad));
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(wide), level);
    const __m512i bits = _mm512_castps_si512(product);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(product, product, _CMP_UNORD_Q);
    const __m512i even = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan,
                                               _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(even));
  }
};

template <int kBits, typename Out>
MT_INLINE void decode_blocks(const uint8_t* codes, const void* levels,
                             const typename Out::T* grad, typename Out::T* out, int64_t blocks) {
  constexpr int kLanes = lanes_of(kBits), kWidth = 256 / kLanes, kBytes = kLanes * kBits / 8;
  // Only an index's low 4 bits count: with the table repeated nothing needs masking.
  const __m512 table = _mm512_castsi512_ps(repeated<1 << kBits>(levels));
  for (int64_t b = 0; b < blocks; ++b, codes += 32 * kBits)
    for (int c = 0; c < kWidth; c += 16) {
      __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 3
      for (int byte = 0; byte < kBytes; ++byte) {
        const auto* from = reinterpret_cast<const __m128i*>(codes + byte * kWidth + c);
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
        word = _mm512_or_si512(word, _mm512_slli_epi32(wide, 8 * byte));
      }
#pragma GCC unroll 8
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t at = b * 256 + lane * kWidth + c;
        const __m512i index = _mm512_srli_epi32(word, kBits * lane);
        Out::write(grad + at, _mm512_permutexvar_ps(index, table), out + at);
      }
    }
}

template <typename Out>
MT_INLINE void decode_any(const uint8_t* codes, const void* levels, const typename Out::T* grad,
                          typename Out::T* out, int64_t blocks, int64_t bits) {
  if (bits == 1) decode_blocks<1, Out>(codes, levels, grad, out, blocks);
  if (bits == 2) decode_blocks<2, Out>(codes, levels, grad, out, blocks);
  if (bits == 3) decode_blocks<3, Out>(codes, levels, grad, out, blocks);
  if (bits == 4) decode_blocks<4, Out>(codes, levels, grad, out, blocks);
}

void encode(const float* x, const float* boundaries, uint8_t* out, int64_t blocks,
                   int64_t bits) {
  if (bits == 1) encode_blocks<1>(x, boundaries, out, blocks);
  if (bits == 2) encode_blocks<2>(x, boundaries, out, blocks);
  if (bits == 3) encode_blocks<3>(x, boundaries, out, blocks);
  if (bits == 4) encode_blocks<4>(x, boundaries, out, blocks);
}

void decode(const uint8_t* codes, const uint32_t* levels, uint32_t* out, int64_t blocks,
                   int64_t bits) {
  decode_any<Levels>(codes, levels, out, out, blocks, bits);
}

void multiply(const uint8_t* codes, const void* levels, const float* grad, float* out,
                     int64_t blocks, int64_t bits) {
  decode_any<Float32>(codes, levels, grad, out, blocks, bits);
}

void multiply(const uint8_t* codes, const void* levels, const uint16_t* grad, uint16_t* out,
                     int64_t blocks, int64_t bits) {
  decode_any<Bfloat16>(codes, levels, grad, out, blocks, bits);
}

}  // namespace
}  // namespace memtrain::avx512

#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

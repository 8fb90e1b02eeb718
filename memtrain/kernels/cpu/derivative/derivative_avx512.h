// Few-bit codes of 1 to 4 bits with AVX-512: a permutation of sixteen lanes is a table look-up,
// which no loop makes the compiler see. Whole blocks only; layout and results as in derivative.cpp.
#pragma once

#include "packing/codes.h"

#ifdef MT_X86
#include <cstring>
#include <type_traits>

#include "derivative/exponential.h"
#include "avx512_begin.h"

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

// What is encoded: how numbers are read, how values are written.
MT_INLINE __m512 read(const float* x) { return _mm512_loadu_ps(x); }
MT_INLINE __m512 read(const uint16_t* x) {  // bfloat16
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

MT_INLINE void write(__m512 x, float* out) { _mm512_storeu_ps(out, x); }
MT_INLINE void write(__m512 x, uint16_t* out) {  // to the nearest, ties to even
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i even =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(even));
}

// The function whose value is wanted besides; NaN passes.
struct NoValue {
  MT_INLINE __m512 of(__m512 x) { return x; }
};
struct Relu {
  MT_INLINE __m512 of(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }
};
struct Silu {  // as in derivative.cpp
  MT_INLINE __m512 of(__m512 x) {
    __m512 d = _mm512_sub_ps(_mm512_set1_ps(-0.0f), x);
    d = _mm512_min_ps(_mm512_set1_ps(104.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), d));
    const __m512 turns = _mm512_mul_ps(d, _mm512_set1_ps(exponential::kInverseLog2));
    const __m512 q = _mm512_roundscale_ps(turns, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 s = _mm512_fmadd_ps(q, _mm512_set1_ps(-exponential::kLog2High), d);
    s = _mm512_fmadd_ps(q, _mm512_set1_ps(-exponential::kLog2Low), s);
    __m512 u = _mm512_set1_ps(exponential::kTerms[0]);
#pragma GCC unroll 5
    for (int k = 1; k < exponential::kCount; ++k)
      u = _mm512_fmadd_ps(u, s, _mm512_set1_ps(exponential::kTerms[k]));
    u = _mm512_fmadd_ps(_mm512_mul_ps(s, s), u, s);
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, _mm512_scalef_ps(_mm512_add_ps(one, u), q)));
  }
};

// What the boundaries are compared with: x less `shift`, without its sign where `kept` says so.
struct Side {
  float shift;
  int32_t kept;
};

// Fetches what lies 2 KiB ahead, half a page: the hardware does not look beyond pages.
MT_INLINE void fetch(const void* at) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + 2048));
}

template <int kBits, typename Value, bool kAside, typename T>
MT_INLINE void encode_blocks(const T* x, T* y, const float* boundaries, const Side& side,
                             uint8_t* out, int64_t blocks) {
  constexpr int kLanes = lanes_of(kBits), kWidth = 256 / kLanes, kBytes = kLanes * kBits / 8;
  constexpr int kWords = kWidth / 16;  // vectors of words
  const auto b = Boundaries<kBits>::of(boundaries);
  const __m512 shift = _mm512_set1_ps(side.shift);
  const __m512i kept = _mm512_set1_epi32(side.kept);
  for (; blocks > 0; --blocks, x += 256, y += 256, out += 32 * kBits) {
    __m512i word[kWords] = {};
    // In the order of memory, which is fetched ahead: a word gets a lane at a time.
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      fetch(x + 16 * k);
      __m512 v = read(x + 16 * k);
      if constexpr (!std::is_same_v<Value, NoValue>) write(Value::of(v), y + 16 * k);
      if constexpr (kAside)
        v = _mm512_castsi512_ps(
            _mm512_and_si512(_mm512_castps_si512(_mm512_sub_ps(v, shift)), kept));
      const __m512i code = _mm512_slli_epi32(code_of<kBits>(v, b), kBits * (k / kWords));
      word[k % kWords] = _mm512_or_si512(word[k % kWords], code);
    }
#pragma GCC unroll 8
    for (int w = 0; w < kWords; ++w)
#pragma GCC unroll 3
      for (int byte = 0; byte < kBytes; ++byte)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + byte * kWidth + 16 * w),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(word[w], 8 * byte)));
  }
}

// Of `n` numbers, the last block filled up with 0.
template <int kBits, typename Value, bool kAside, typename T>
void encode_numbers(const T* x, T* y, const float* boundaries, const Side& side, uint8_t* out,
                    int64_t n) {
  const int64_t blocks = n / 256, whole = blocks * 256, rest = n - whole;
  encode_blocks<kBits, Value, kAside>(x, y, boundaries, side, out, blocks);
  if (rest == 0) return;
  T from[256] = {}, to[256];
  std::memcpy(from, x + whole, rest * sizeof(T));
  encode_blocks<kBits, Value, kAside>(from, to, boundaries, side, out + blocks * 32 * kBits, 1);
  if constexpr (!std::is_same_v<Value, NoValue>) std::memcpy(y + whole, to, rest * sizeof(T));
}

template <typename Value, bool kAside, typename T>
void encode_any(const T* x, T* y, const float* boundaries, const Side& side, uint8_t* out,
                int64_t n, int64_t bits) {
  if (bits == 1) encode_numbers<1, Value, kAside>(x, y, boundaries, side, out, n);
  if (bits == 2) encode_numbers<2, Value, kAside>(x, y, boundaries, side, out, n);
  if (bits == 3) encode_numbers<3, Value, kAside>(x, y, boundaries, side, out, n);
  if (bits == 4) encode_numbers<4, Value, kAside>(x, y, boundaries, side, out, n);
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
    avx512::write(_mm512_mul_ps(read(grad), level), out);
  }
};

template <int kBits, typename Out>
MT_INLINE void decode_blocks(const uint8_t* codes, const void* levels,
                             const typename Out::T* grad, typename Out::T* out, int64_t blocks) {
  constexpr int kLanes = lanes_of(kBits), kWidth = 256 / kLanes, kBytes = kLanes * kBits / 8;
  constexpr int kWords = kWidth / 16;
  // Only an index's low 4 bits count: with the table repeated nothing needs masking.
  const __m512 table = _mm512_castsi512_ps(repeated<1 << kBits>(levels));
  for (; blocks > 0; --blocks, codes += 32 * kBits, grad += 256, out += 256) {
    __m512i word[kWords];
#pragma GCC unroll 8
    for (int w = 0; w < kWords; ++w) {
      word[w] = _mm512_setzero_si512();
#pragma GCC unroll 3
      for (int byte = 0; byte < kBytes; ++byte) {
        const auto* from = reinterpret_cast<const __m128i*>(codes + byte * kWidth + 16 * w);
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
        word[w] = _mm512_or_si512(word[w], _mm512_slli_epi32(wide, 8 * byte));
      }
    }
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      fetch(grad + 16 * k);
      const __m512i index = _mm512_srli_epi32(word[k % kWords], kBits * (k / kWords));
      Out::write(grad + 16 * k, _mm512_permutexvar_ps(index, table), out + 16 * k);
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

void encode(const float* x, const float* boundaries, uint8_t* out, int64_t blocks, int64_t bits) {
  encode_any<NoValue, false, float>(x, nullptr, boundaries, {}, out, blocks * 256, bits);
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

#include "avx512_end.h"
#endif

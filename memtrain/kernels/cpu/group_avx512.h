// Group quantisation with AVX-512: sixteen values at a time from float to packed bytes, and levels
// from a table in a register. Groups of whole sixteens only; results as in group.cpp.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MT_GROUP_AVX512
#include <immintrin.h>

#include "common.h"

// Defined in codebook.cpp: 2 where the machine has AVX-512 and it is not switched off.
MT_EXPORT int mt_isa();

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")

namespace memtrain::avx512 {
namespace {

struct Ends {
  float lo, hi;
  uint32_t top;  // the greatest magnitude's bits
};

// Four runs side by side hide each other's waits.
Ends ends_of(const float* x, int64_t size) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512 lo[4], hi[4];
  __m512i top[4];
  for (int k = 0; k < 4; ++k) {
    lo[k] = hi[k] = _mm512_loadu_ps(x);
    top[k] = _mm512_setzero_si512();
  }
  int64_t i = 0;
  const auto take = [&](int k) __attribute__((always_inline)) {
    const __m512 v = _mm512_loadu_ps(x + i);
    lo[k] = _mm512_min_ps(v, lo[k]);
    hi[k] = _mm512_max_ps(v, hi[k]);
    top[k] = _mm512_max_epu32(top[k], _mm512_and_si512(_mm512_castps_si512(v), magnitude));
    i += 16;
  };
  while (i + 64 <= size) take(0), take(1), take(2), take(3);
  while (i < size) take(0);
  for (int k = 1; k < 4; ++k) {
    lo[0] = _mm512_min_ps(lo[k], lo[0]);
    hi[0] = _mm512_max_ps(hi[k], hi[0]);
    top[0] = _mm512_max_epu32(top[k], top[0]);
  }
  return {_mm512_reduce_min_ps(lo[0]), _mm512_reduce_max_ps(hi[0]), _mm512_reduce_max_epu32(top[0])};
}

// High and low words of x times m, lane by lane.
struct Product {
  __m512i high, low;
  MT_INLINE Product of(__m512i x, __m512i m) {
    const __m512i even = _mm512_mul_epu32(x, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    return {_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB),
            _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA)};
  }
};

struct Rounding {
  float base, inverse, levels;
  bool stochastic;
  uint32_t keys[20];  // of Philox's ten rounds
};

Rounding rounding_of(uint64_t seed, bool stochastic) {
  Rounding r{0, 0, 0, stochastic, {}};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < 20; i += 2, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    r.keys[i] = k0, r.keys[i + 1] = k1;
  return r;
}

// The words of 16 * N counters (kernels/philox.py): two at a time hide each other's waits.
template <int N>
MT_INLINE void draw(uint32_t first, const uint32_t* keys, __m512i (*words)[4]) {
  const __m512i m0 = _mm512_set1_epi32(static_cast<int>(0xD2511F53u));
  const __m512i m1 = _mm512_set1_epi32(static_cast<int>(0xCD9E8D57u));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    const __m512i start = _mm512_set1_epi32(static_cast<int>(first + 16u * n));
    words[n][0] = _mm512_add_epi32(start, lane);
    words[n][1] = words[n][2] = words[n][3] = _mm512_setzero_si512();
  }
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const __m512i key0 = _mm512_set1_epi32(static_cast<int>(keys[2 * round]));
    const __m512i key1 = _mm512_set1_epi32(static_cast<int>(keys[2 * round + 1]));
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      __m512i* c = words[n];
      const Product p0 = Product::of(c[0], m0), p1 = Product::of(c[2], m1);
      c[0] = _mm512_ternarylogic_epi32(p1.high, c[1], key0, 0x96);  // exclusive or of three
      c[2] = _mm512_ternarylogic_epi32(p0.high, c[3], key1, 0x96);
      c[1] = p1.low;
      c[3] = p0.low;
    }
  }
}

constexpr int lanes_of_group(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

// Sixteen positions of the eight slices of a group, which share their counters; a lane of the
// packed words is one slice or more.
template <int kBits>
MT_INLINE void encode_bits(const float* x, uint8_t* out, int64_t size, const __m512i* draws,
                           const Rounding& r) {
  constexpr int kLanes = lanes_of_group(kBits), kSlices = 8 / kLanes, kBytes = kLanes * kBits / 8;
  static_assert(kLanes * kBits <= 32, "a word has 32 bits");
  const __m512 half = _mm512_set1_ps(0.5f), base = _mm512_set1_ps(r.base);
  const __m512 inverse = _mm512_set1_ps(r.inverse), levels = _mm512_set1_ps(r.levels);
  const int64_t slice = size / 8, width = size / kLanes;
  __m512i word[kSlices];
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
    __m512 u = half;
    if (r.stochastic) {
      const __m512i low = s % 2 ? _mm512_srli_epi32(draws[s / 2], 16)
                                : _mm512_and_si512(draws[s / 2], _mm512_set1_epi32(0xFFFF));
      // (draw + 0.5) / 2**16: exact, so fused or not is the same.
      u = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(0x1p-16f),
                          _mm512_set1_ps(0x1p-17f));
    }
    const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + s * slice), half);
    __m512 t = _mm512_add_ps(_mm512_mul_ps(_mm512_sub_ps(v, base), inverse), u);
    t = _mm512_max_ps(_mm512_min_ps(t, levels), _mm512_setzero_ps());
    const __m512i code = _mm512_slli_epi32(_mm512_cvttps_epi32(t), kBits * (s / kSlices));
    word[s % kSlices] = s < kSlices ? code : _mm512_or_si512(word[s % kSlices], code);
  }
#pragma GCC unroll 8
  for (int h = 0; h < kSlices; ++h)
#pragma GCC unroll 4
    for (int k = 0; k < kBytes; ++k)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k * width + h * slice),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(word[h], 8 * k)));
}

template <int kBits>
MT_INLINE void encode_slices(const float* x, uint8_t* out, int64_t size, uint32_t first,
                             const Rounding& r) {
  const int64_t slice = size / 8;
  __m512i draws[2][4];
  int64_t c = 0;
  for (; c + 32 <= slice; c += 32) {
    if (r.stochastic) draw<2>(first + static_cast<uint32_t>(c), r.keys, draws);
    encode_bits<kBits>(x + c, out + c, size, draws[0], r);
    encode_bits<kBits>(x + c + 16, out + c + 16, size, draws[1], r);
  }
  if (c == slice) return;
  if (r.stochastic) draw<1>(first + static_cast<uint32_t>(c), r.keys, draws);
  encode_bits<kBits>(x + c, out + c, size, draws[0], r);
}

// Words of 5 and 7 bits are too long.
bool can_encode(int64_t size, int64_t bits) {
  return mt_isa() >= 2 && size % 128 == 0 && bits != 5 && bits != 7;
}

void encode_group(const float* x, uint8_t* out, int64_t size, int64_t bits, uint32_t first,
                  const Rounding& r) {
  if (bits == 1) encode_slices<1>(x, out, size, first, r);
  if (bits == 2) encode_slices<2>(x, out, size, first, r);
  if (bits == 3) encode_slices<3>(x, out, size, first, r);
  if (bits == 4) encode_slices<4>(x, out, size, first, r);
  if (bits == 6) encode_slices<6>(x, out, size, first, r);
  if (bits == 8) encode_slices<8>(x, out, size, first, r);
}

// The upper halves, rounded to nearest even.
MT_INLINE __m512i to_bfloat(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7FC0));
}

template <int kBits, typename T>
MT_INLINE void decode_bits(const uint8_t* in, T* out, int64_t size, __m512 values) {
  constexpr int kLanes = lanes_of_group(kBits), kBytes = kLanes * kBits / 8;
  const int64_t width = size / kLanes;
  const __m512i table = sizeof(T) == 2 ? to_bfloat(values) : _mm512_castps_si512(values);
  for (int64_t c = 0; c < width; c += 16) {
    __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (int k = 0; k < kBytes; ++k) {
      const auto* from = reinterpret_cast<const __m128i*>(in + k * width + c);
      const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from));
      word = _mm512_or_si512(word, _mm512_slli_epi32(wide, 8 * k));
    }
#pragma GCC unroll 8
    for (int l = 0; l < kLanes; ++l) {
      // Only an index's low 4 bits count, and the table repeats itself.
      const __m512i index = _mm512_srli_epi32(word, kBits * l);
      const __m512i value = _mm512_permutexvar_epi32(index, table);
      T* to = out + l * width + c;
      if constexpr (sizeof(T) == 2)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
      else
        _mm512_storeu_si512(to, value);
    }
  }
}

bool can_decode(int64_t size, int64_t bits) {
  return mt_isa() >= 2 && size % 128 == 0 && bits <= 4;
}

template <typename T>
MT_INLINE void decode_group(const uint8_t* in, T* out, int64_t size, int64_t bits, float base,
                            float step) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i code = _mm512_and_si512(lane, _mm512_set1_epi32((1 << bits) - 1));
  const __m512 steps = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(step));
  const __m512 values =
      _mm512_mul_ps(_mm512_add_ps(_mm512_set1_ps(base), steps), _mm512_set1_ps(2.0f));
  if (bits == 1) decode_bits<1>(in, out, size, values);
  if (bits == 2) decode_bits<2>(in, out, size, values);
  if (bits == 3) decode_bits<3>(in, out, size, values);
  if (bits == 4) decode_bits<4>(in, out, size, values);
}

void decode_floats(const uint8_t* in, float* out, int64_t size, int64_t bits, float base,
                   float step) {
  decode_group(in, out, size, bits, base, step);
}

void decode_bfloats(const uint8_t* in, uint16_t* out, int64_t size, int64_t bits, float base,
                    float step) {
  decode_group(in, out, size, bits, base, step);
}

}  // namespace
}  // namespace memtrain::avx512

#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

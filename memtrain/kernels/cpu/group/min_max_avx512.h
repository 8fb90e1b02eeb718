// The bounds of groups with AVX-512, up to sixteen groups at a time, and what encoding needs to
// know of them. Whole groups only; results as in group.cpp.
#pragma once

#include "common.h"

#ifdef MT_X86
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

constexpr int kTogether = 16;  // groups: one lane each

// Lane g: the least and the greatest number of group g, and whether all its numbers are finite.
struct MinMax {
  __m512 lo, hi;
  __mmask16 finite;
};

struct Smaller {
  MT_INLINE __m512 of(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
};
struct Larger {
  MT_INLINE __m512 of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
};

// Reduces each of sixteen vectors to a number: one lane each, in order.
template <typename Op>
MT_INLINE __m512 reduce_each(const __m512* v) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = Op::of(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                  _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = Op::of(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                  _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i)
    c[i] = Op::of(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                  _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
  return Op::of(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
}

// A group's minima and maxima, and whether all its numbers are finite. Runs side by side hide each
// other's waits.
template <int N>
MT_INLINE bool lanes_min_max(const float* x, int64_t size, __m512& lo, __m512& hi) {
  __m512 los[N], his[N], zero[N];  // x * 0 is NaN where x is Inf or NaN
  for (int k = 0; k < N; ++k) {
    los[k] = his[k] = _mm512_set1_ps(x[0]);
    zero[k] = _mm512_setzero_ps();
  }
  const auto take = [&](int k, __m512 v) __attribute__((always_inline)) {
    los[k] = _mm512_min_ps(v, los[k]);
    his[k] = _mm512_max_ps(v, his[k]);
    zero[k] = _mm512_fmadd_ps(v, _mm512_setzero_ps(), zero[k]);
  };
  int64_t i = 0;
  for (; i + 16 * N <= size; i += 16 * N)
#pragma GCC unroll 4
    for (int k = 0; k < N; ++k) take(k, _mm512_loadu_ps(x + i + 16 * k));
  for (; i < size; i += 16) {
    const auto some = static_cast<__mmask16>(_bzhi_u32(0xFFFF, static_cast<uint32_t>(size - i)));
    take(0, _mm512_mask_loadu_ps(los[0], some, x + i));
  }
  for (int together = N / 2; together; together /= 2)
#pragma GCC unroll 2
    for (int k = 0; k < together; ++k) {
      los[k] = _mm512_min_ps(los[k], los[k + together]);
      his[k] = _mm512_max_ps(his[k], his[k + together]);
      zero[k] = _mm512_add_ps(zero[k], zero[k + together]);
    }
  lo = los[0], hi = his[0];
  return _mm512_cmp_ps_mask(zero[0], zero[0], _CMP_UNORD_Q) == 0;
}

template <int N>
MT_INLINE MinMax min_max_in_runs(const float* x, int64_t size, int count) {
  __m512 los[kTogether], his[kTogether];
  MinMax found;
  found.finite = 0;
  for (int g = 0; g < kTogether; ++g)
    if (g < count)
      found.finite |=
          static_cast<__mmask16>(lanes_min_max<N>(x + g * size, size, los[g], his[g]) << g);
    else
      los[g] = his[g] = _mm512_setzero_ps();
  found.lo = reduce_each<Smaller>(los), found.hi = reduce_each<Larger>(his);
  return found;
}

MT_INLINE MinMax min_max_of(const float* x, int64_t size, int count) {
  return size < 64 ? min_max_in_runs<1>(x, size, count) : min_max_in_runs<4>(x, size, count);
}

// Sixteen-bit integers in the order of the bfloat16s with these bits, and back.
MT_INLINE __m512i key_of(__m512i bits) {
  const __m512i sign = _mm512_srai_epi16(bits, 15);
  return _mm512_ternarylogic_epi32(bits, sign, _mm512_set1_epi16(0x7FFF), 0x78);  // a ^ (b & c)
}

// A bfloat16 group's greatest keys in sixteen lanes, and in the other sixteen those of all its
// numbers with every bit turned over: their order is turned around, so that these are the least.
MT_INLINE __m512i lanes_keys(const uint16_t* x, int64_t size) {
  __m512i los[2], his[2];
  const __m512i first = _mm512_set1_epi16(static_cast<int16_t>(x[0]));
  for (int k = 0; k < 2; ++k) los[k] = his[k] = key_of(first);
  const auto take = [&](int k, __m512i bits) __attribute__((always_inline)) {
    const __m512i key = key_of(bits);
    los[k] = _mm512_min_epi16(key, los[k]);
    his[k] = _mm512_max_epi16(key, his[k]);
  };
  int64_t i = 0;
  for (; i + 64 <= size; i += 64)
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) take(k, _mm512_loadu_si512(x + i + 32 * k));
  for (; i < size; i += 32) {
    const uint32_t left = static_cast<uint32_t>(size - i);
    take(0, _mm512_mask_loadu_epi16(first, _bzhi_u32(~0u, left), x + i));
  }
  const __m512i low = _mm512_min_epi16(los[0], los[1]), high = _mm512_max_epi16(his[0], his[1]);
  const __m512i over = _mm512_xor_si512(low, _mm512_set1_epi32(-1));
  return _mm512_max_epi16(_mm512_inserti64x4(high, _mm512_castsi512_si256(over), 1),
                          _mm512_shuffle_i64x2(high, over, 0xEE));
}

// Reduces the quarters of each of sixteen vectors to the greatest: quarters 0 and 1 of what comes
// back have it of the first halves, quarters 2 and 3 of the second halves, sixteen in order.
MT_INLINE __m512i reduce_keys(const __m512i* v) {
  __m512i a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_max_epi16(_mm512_unpacklo_epi16(v[2 * i], v[2 * i + 1]),
                            _mm512_unpackhi_epi16(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_max_epi16(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]),
                            _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_max_epi16(_mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]),
                            _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
  const __m512i even = _mm512_shuffle_i64x2(c[0], c[1], 0x88);
  const __m512i both = _mm512_max_epi16(even, _mm512_shuffle_i64x2(c[0], c[1], 0xDD));
  return _mm512_shuffle_i64x2(both, both, 0xD8);
}

MT_INLINE __m512 number_of(__m256i keys) {
  const __m512i bits = key_of(_mm512_castsi256_si512(keys));
  const __m512i wide = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// As integers: thirty-two at a time.
MT_INLINE MinMax min_max_of(const uint16_t* x, int64_t size, int count) {
  __m512i keys[kTogether];
  for (int g = 0; g < kTogether; ++g)
    keys[g] = g < count ? lanes_keys(x + g * size, size) : _mm512_setzero_si512();
  const __m512i greatest = reduce_keys(keys);
  const __m256i high = _mm512_castsi512_si256(greatest);
  const __m256i low = _mm256_xor_si256(_mm512_extracti64x4_epi64(greatest, 1),
                                       _mm256_set1_epi32(-1));
  // From Infinity's key on upwards, and from -Infinity's downwards, there is nothing finite.
  const __mmask16 finite = _mm256_cmplt_epi16_mask(high, _mm256_set1_epi16(0x7F80)) &
                           _mm256_cmpgt_epi16_mask(low, _mm256_set1_epi16(-0x7F81));
  return {number_of(low), number_of(high), finite};
}

MT_INLINE float number_at(const float* x) { return *x; }
MT_INLINE float number_at(const uint16_t* x) {
  const uint32_t bits = static_cast<uint32_t>(*x) << 16;
  float number;
  __builtin_memcpy(&number, &bits, 4);
  return number;
}

// Lane `g` of a group that holds others, too: the least and the greatest of its finite numbers.
template <typename T>
__attribute__((noinline)) void keep_finite(const T* x, int64_t size, int g, MinMax& found) {
  float lo = __builtin_inff(), hi = -lo;
  for (int64_t i = 0; i < size; ++i) {
    const float v = number_at(x + i);
    if (v - v != 0.0f) continue;
    lo = v < lo ? v : lo, hi = v > hi ? v : hi;
  }
  const auto lane = static_cast<__mmask16>(1 << g);
  found.lo = _mm512_mask_mov_ps(found.lo, lane, _mm512_set1_ps(lo));
  found.hi = _mm512_mask_mov_ps(found.hi, lane, _mm512_set1_ps(hi));
}

// What encoding needs to know of each group.
struct Scales {
  float base[kTogether], inverse[kTogether];
  __mmask16 inside;  // all the group's numbers are finite and within its bounds
};

// As `outward` in group.cpp.
MT_INLINE __m512 outward(__m512 x, bool up, bool wide) {
  const __m512 limit = _mm512_set1_ps(0x1.FEp127f);
  if (!wide) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 negative = _mm512_movepi32_mask(bits);
    const __mmask16 cut = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xFFFF));
    const __m512i kept = _mm512_andnot_si512(_mm512_set1_epi32(0xFFFF), bits);
    const __mmask16 enlarge = cut & static_cast<__mmask16>(up ? ~negative : negative);
    x = _mm512_castsi512_ps(
        _mm512_mask_add_epi32(kept, enlarge, kept, _mm512_set1_epi32(0x10000)));
  }
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_sub_ps(_mm512_setzero_ps(), limit)), limit);
  return _mm512_add_ps(x, _mm512_setzero_ps());
}

MT_INLINE void store_bounds(__m512 lo, __m512 hi, bool wide, int count, void* to) {
  const __m512i low = _mm512_castps_si512(lo), high = _mm512_castps_si512(hi);
  if (!wide) {
    const __m512i both = _mm512_or_si512(
        _mm512_srli_epi32(low, 16), _mm512_andnot_si512(_mm512_set1_epi32(0xFFFF), high));
    return _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1 << count) - 1), both);
  }
  float los[kTogether], his[kTogether], *out = static_cast<float*>(to);
  _mm512_storeu_ps(los, lo);
  _mm512_storeu_ps(his, hi);
  for (int g = 0; g < count; ++g) out[2 * g] = los[g], out[2 * g + 1] = his[g];
}

// The bounds of `count` groups, stored, and what follows from them.
template <typename T>
MT_INLINE Scales scales_of(const T* x, int64_t size, int count, bool wide, float levels,
                           void* bounds) {
  MinMax found = min_max_of(x, size, count);
  for (int g = 0; g < count; ++g)
    if (!(found.finite >> g & 1)) keep_finite(x + g * size, size, g, found);
  Scales s;
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
  const __m512 limit = _mm512_set1_ps(0x1.FEp127f), half = _mm512_set1_ps(0.5f);
  __m512 lo = outward(found.lo, false, wide);
  __m512 hi = outward(found.hi, true, wide);
  const __mmask16 some = _mm512_cmp_ps_mask(found.lo, found.hi, _CMP_LE_OQ);
  lo = _mm512_mask_mov_ps(nan, some, lo), hi = _mm512_mask_mov_ps(nan, some, hi);
  s.inside = found.finite & _mm512_cmp_ps_mask(_mm512_abs_ps(lo), limit, _CMP_LT_OQ) &
             _mm512_cmp_ps_mask(_mm512_abs_ps(hi), limit, _CMP_LT_OQ);
  store_bounds(lo, hi, wide, count, bounds);
  const __m512 base = _mm512_mul_ps(half, lo);
  const __m512 range = _mm512_sub_ps(_mm512_mul_ps(half, hi), base);
  const __mmask16 wide_enough = _mm512_cmp_ps_mask(range, _mm512_set1_ps(0x1p-101f), _CMP_GE_OQ);
  const __m512 step = _mm512_div_ps(range, _mm512_set1_ps(levels));
  _mm512_storeu_ps(s.base, base);
  _mm512_storeu_ps(s.inverse, _mm512_maskz_div_ps(wide_enough, _mm512_set1_ps(1.0f), step));
  return s;
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

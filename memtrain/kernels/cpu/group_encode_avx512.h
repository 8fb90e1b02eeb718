// Group quantisation with AVX-512: up to sixteen groups at a time, their bounds a lane each, then
// from numbers to packed bytes. Whole groups of whole 128s only; results as in group.cpp.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include "philox_avx512.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")

namespace memtrain::avx512 {
namespace {

MT_INLINE __m512 load(const float* x) { return _mm512_loadu_ps(x); }
MT_INLINE __m512 load(const uint16_t* x) {  // bfloat16
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Half of x less `base`, rounded once: so is the difference alone, where half of x is exact.
MT_INLINE __m512 half_less(const float*, __m512 x, __m512 base) {
  return _mm512_sub_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), base);
}
MT_INLINE __m512 half_less(const uint16_t*, __m512 x, __m512 base) {
  return _mm512_fmsub_ps(x, _mm512_set1_ps(0.5f), base);
}

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

// The lanes' minima and maxima, and whether all are finite. Four runs side by side hide each
// other's waits.
template <typename T>
MT_INLINE bool ends_of(const T* x, int64_t size, __m512& lo, __m512& hi) {
  __m512 los[4], his[4], zero[4];  // x * 0 is NaN where x is Inf or NaN
  for (int k = 0; k < 4; ++k) {
    los[k] = his[k] = load(x);
    zero[k] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < size; i += 64)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512 v = load(x + i + 16 * k);
      los[k] = _mm512_min_ps(v, los[k]);
      his[k] = _mm512_max_ps(v, his[k]);
      zero[k] = _mm512_fmadd_ps(v, _mm512_setzero_ps(), zero[k]);
    }
  lo = _mm512_min_ps(_mm512_min_ps(los[0], los[1]), _mm512_min_ps(los[2], los[3]));
  hi = _mm512_max_ps(_mm512_max_ps(his[0], his[1]), _mm512_max_ps(his[2], his[3]));
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(zero[0], zero[1]), _mm512_add_ps(zero[2], zero[3]));
  return _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) == 0;
}

// Sixteen-bit integers in the order of the bfloat16s with these bits, and back.
MT_INLINE __m512i key_of(__m512i bits) {
  const __m512i sign = _mm512_srai_epi16(bits, 15);
  return _mm512_ternarylogic_epi32(bits, sign, _mm512_set1_epi16(0x7FFF), 0x78);  // a ^ (b & c)
}

// The sixteen first and last numbers with these keys.
MT_INLINE __m512 lower_half(__m512i keys) {
  const __m256i half = _mm512_castsi512_si256(key_of(keys));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
MT_INLINE __m512 upper_half(__m512i keys) {
  return lower_half(_mm512_shuffle_i64x2(keys, keys, 0xEE));
}

// Of bfloat16s thirty-two at a time, as integers.
MT_INLINE bool ends_of(const uint16_t* x, int64_t size, __m512& lo, __m512& hi) {
  __m512i los[2], his[2];
  for (int k = 0; k < 2; ++k) los[k] = his[k] = key_of(_mm512_loadu_si512(x));
  for (int64_t i = 0; i < size; i += 64)
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const __m512i key = key_of(_mm512_loadu_si512(x + i + 32 * k));
      los[k] = _mm512_min_epi16(key, los[k]);
      his[k] = _mm512_max_epi16(key, his[k]);
    }
  const __m512i low = _mm512_min_epi16(los[0], los[1]), high = _mm512_max_epi16(his[0], his[1]);
  lo = _mm512_min_ps(lower_half(low), upper_half(low));
  hi = _mm512_max_ps(lower_half(high), upper_half(high));
  // From Infinity's key on upwards, and from -Infinity's downwards.
  const __mmask32 above = _mm512_cmpge_epi16_mask(high, _mm512_set1_epi16(0x7F80));
  const __mmask32 below = _mm512_cmple_epi16_mask(low, _mm512_set1_epi16(-0x7F81));
  return (above | below) == 0;
}

constexpr int kTogether = 16;  // groups: one lane each

// What encoding needs to know of each group.
struct Scales {
  float base[kTogether], inverse[kTogether];
  __mmask16 finite;
  __mmask16 inside;  // no number of the group lies beyond its bounds
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
  __m512 los[kTogether], his[kTogether];
  Scales s;
  s.finite = 0;
  for (int g = 0; g < kTogether; ++g)
    if (g < count)
      s.finite |= static_cast<__mmask16>(ends_of(x + g * size, size, los[g], his[g]) << g);
    else
      los[g] = his[g] = _mm512_setzero_ps();
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
  const __m512 limit = _mm512_set1_ps(0x1.FEp127f), half = _mm512_set1_ps(0.5f);
  __m512 lo = outward(reduce_each<Smaller>(los), false, wide);
  __m512 hi = outward(reduce_each<Larger>(his), true, wide);
  lo = _mm512_mask_mov_ps(nan, s.finite, lo), hi = _mm512_mask_mov_ps(nan, s.finite, hi);
  s.inside = _mm512_cmp_ps_mask(_mm512_abs_ps(lo), limit, _CMP_LT_OQ) &
             _mm512_cmp_ps_mask(_mm512_abs_ps(hi), limit, _CMP_LT_OQ);
  store_bounds(lo, hi, wide, count, bounds);
  const __m512 base = _mm512_mul_ps(half, lo);
  const __m512 range = _mm512_sub_ps(_mm512_mul_ps(half, hi), base);
  const __mmask16 some = _mm512_cmp_ps_mask(range, _mm512_set1_ps(0x1p-101f), _CMP_GE_OQ);
  const __m512 step = _mm512_div_ps(range, _mm512_set1_ps(levels));
  _mm512_storeu_ps(s.base, base);
  _mm512_storeu_ps(s.inverse, _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), step));
  return s;
}

constexpr int lanes_of_group(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

struct Encoding {
  Keys keys;
  float base, inverse, levels;
  bool stochastic;
  int64_t ahead;  // how far ahead numbers are fetched, in elements
};

// Sixteen positions of the eight slices of a group, which share their counters; a lane of the
// packed words is one slice or more. Where all numbers are `inside` the bounds, a code of up to
// 4 bits needs no limits: it is below 2**bits by more than the roundings.
template <int kBits, bool kInside, typename T>
MT_INLINE void encode_bits(const T* x, uint8_t* out, int64_t size, const __m512i* draws,
                           const Encoding& e) {
  constexpr int kLanes = lanes_of_group(kBits), kSlices = 8 / kLanes, kBytes = kLanes * kBits / 8;
  static_assert(kLanes * kBits <= 32, "a word has 32 bits");
  const __m512 half = _mm512_set1_ps(0.5f), base = _mm512_set1_ps(e.base);
  const __m512 inverse = _mm512_set1_ps(e.inverse), levels = _mm512_set1_ps(e.levels);
  const int64_t slice = size / 8, width = size / kLanes;
  __m512i word[kSlices];
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
    __m512 u = half;
    if (e.stochastic) {
      const __m512i low = s % 2 ? _mm512_srli_epi32(draws[s / 2], 16)
                                : _mm512_and_si512(draws[s / 2], _mm512_set1_epi32(0xFFFF));
      // (draw + 0.5) / 2**16: exact, so fused or not is the same.
      u = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_set1_ps(0x1p-16f),
                          _mm512_set1_ps(0x1p-17f));
    }
    _mm_prefetch(reinterpret_cast<const char*>(x + s * slice + e.ahead), _MM_HINT_T1);
    const __m512 above = half_less(x, load(x + s * slice), base);
    __m512 t = _mm512_add_ps(_mm512_mul_ps(above, inverse), u);
    if (!kInside) t = _mm512_max_ps(_mm512_min_ps(t, levels), _mm512_setzero_ps());
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

// The group of an odd number turns the words that it shares (kernels/philox.py).
MT_INLINE void turn(__m512i* words) {
  for (int w = 0; w < 4; ++w) words[w] = _mm512_ror_epi32(words[w], 8);
}

template <int kBits, typename T>
MT_INLINE void encode_part(const T* x, uint8_t* out, int64_t size, const __m512i* draws,
                           const Encoding& e, bool inside) {
  if (kBits <= 4 && inside)
    encode_bits<kBits, true>(x, out, size, draws, e);
  else
    encode_bits<kBits, false>(x, out, size, draws, e);
}

// Groups number `at` to `at + count - 1` of all, of which `from` is the first in `s`: one, or two
// that share their draws.
template <int kBits, typename T>
MT_INLINE void encode_pair(const T* x, uint8_t* out, int64_t size, int64_t at, int count, int from,
                           const Scales& s, Encoding e) {
  const int64_t slice = size / 8, bytes = slice * kBits;
  const uint32_t first = static_cast<uint32_t>(at / 2 * slice);
  __m512i draws[2][4];
  for (int64_t c = 0; c < slice; c += 32) {
    const bool both = c + 16 < slice;
    if (e.stochastic) {
      if (both)
        draw<2>(first + static_cast<uint32_t>(c), e.keys, draws);
      else
        draw<1>(first + static_cast<uint32_t>(c), e.keys, draws);
    }
    for (int g = 0; g < count; ++g) {
      if (e.stochastic && (at + g) % 2) turn(draws[0]), turn(draws[1]);
      e.base = s.base[from + g], e.inverse = s.inverse[from + g];
      const bool inside = s.inside >> (from + g) & 1;
      const T* in = x + g * size + c;
      uint8_t* to = out + g * bytes + c;
      encode_part<kBits>(in, to, size, draws[0], e, inside);
      if (both) encode_part<kBits>(in + 16, to + 16, size, draws[1], e, inside);
    }
  }
}

// Words of 5 and 7 bits are too long.
bool can_encode(int64_t size, int64_t bits) {
  return mt_isa() >= 2 && size % 128 == 0 && bits != 5 && bits != 7;
}

template <int kBits, typename T>
void encode_groups(const T* x, uint8_t* out, void* bounds, bool wide, int64_t size, int64_t begin,
                   int64_t end, Encoding e) {
  const int64_t bytes = size / 8 * kBits, width = wide ? 8 : 4;
  // What is encoded is still in the nearest cache.
  const int64_t together = std::clamp<int64_t>(4096 / size, 2, kTogether);
  e.levels = static_cast<float>((1 << kBits) - 1);
  for (int64_t g = begin; g < end;) {
    const int count = static_cast<int>(std::min(together - (g & 1), end - g));
    const T* from = x + g * size;
    uint8_t* to = out + g * bytes;
    const Scales s = scales_of(from, size, count, wide, e.levels,
                               static_cast<uint8_t*>(bounds) + g * width);
    e.ahead = g + 2 * count <= end ? count * size : 0;
    for (int k = 0; k < count;) {
      const int some = (g + k) % 2 == 0 && k + 1 < count ? 2 : 1;
      encode_pair<kBits>(from + k * size, to + k * bytes, size, g + k, some, k, s, e);
      for (int l = k; l < k + some; ++l)
        if (!(s.finite >> l & 1)) std::memset(to + l * bytes, 0, bytes);
      k += some;
    }
    g += count;
  }
}

template <typename T>
void encode_any(const T* x, uint8_t* out, void* bounds, bool wide, int64_t size,
                int64_t bits, int64_t begin, int64_t end, const Encoding& e) {
  if (bits == 1) encode_groups<1>(x, out, bounds, wide, size, begin, end, e);
  if (bits == 2) encode_groups<2>(x, out, bounds, wide, size, begin, end, e);
  if (bits == 3) encode_groups<3>(x, out, bounds, wide, size, begin, end, e);
  if (bits == 4) encode_groups<4>(x, out, bounds, wide, size, begin, end, e);
  if (bits == 6) encode_groups<6>(x, out, bounds, wide, size, begin, end, e);
  if (bits == 8) encode_groups<8>(x, out, bounds, wide, size, begin, end, e);
}

}  // namespace
}  // namespace memtrain::avx512

#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

// What 4x4 patches need with AVX-512, sixteen at a time: dtypes, levels, codes; results as in
// patch.cpp. Where the values lie: quads_avx512.h (one channel), channels_avx512.h.
#pragma once

#include "common.h"

#ifdef MT_X86
#include "philox_avx512.h"
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

MT_INLINE __m512i splat(int x) { return _mm512_set1_epi32(x); }
MT_INLINE __m512 splat(float x) { return _mm512_set1_ps(x); }
MT_INLINE __m512i as_bits(__m512 x) { return _mm512_castps_si512(x); }
MT_INLINE __m512 as_floats(__m512i x) { return _mm512_castsi512_ps(x); }
MT_INLINE __m512i lanes() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Fetches what lies 2 KiB ahead, half a page: the hardware does not look beyond pages.
MT_INLINE void fetch(const void* at) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + 2048));
}

// -- what the dtypes differ in -------------------------------------------------------------------

struct Floats {
  using T = uint32_t;
  MT_INLINE __m512 load(const T* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
  MT_INLINE __m512 load(const T* from) { return _mm512_loadu_ps(from); }
  MT_INLINE void store(T* to, __mmask16 mask, __m512i raw) {
    _mm512_mask_storeu_epi32(to, mask, raw);
  }
  // To bf16 away from the inside, and no further than bf16 goes.
  MT_INLINE __m512 end(__m512 x, bool up) {
    const __m512i bits = as_bits(x), low = splat(0xFFFF);
    const __mmask16 negative = _mm512_movepi32_mask(bits);
    const __mmask16 enlarge = _mm512_mask_test_epi32_mask(
        static_cast<__mmask16>(up ? ~negative : negative), bits, low);
    const __m512i kept = _mm512_andnot_si512(low, bits);
    x = as_floats(_mm512_mask_add_epi32(kept, enlarge, kept, splat(0x10000)));
    const __m512 limit = splat(0x1.FEp127f);
    return _mm512_min_ps(_mm512_max_ps(x, splat(-0x1.FEp127f)), limit);
  }
  MT_INLINE __m512i bound_bits(__m512 x) { return _mm512_srli_epi32(as_bits(x), 16); }
  MT_INLINE __m512 bound_value(__m512i bits) { return as_floats(_mm512_slli_epi32(bits, 16)); }
  MT_INLINE __m512 rounded(__m512 x) { return x; }
  MT_INLINE __m512i raw(__m512 x) { return as_bits(x); }
  MT_INLINE __m512 half_less(__m512 x, __m512 base) {
    return _mm512_sub_ps(_mm512_mul_ps(x, splat(0.5f)), base);
  }
};

MT_INLINE __m256i load_halves(const uint16_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

struct Bfloats : Floats {
  using T = uint16_t;
  MT_INLINE __m512 load(const T* from, __mmask16 mask) {
    return bound_value(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)));
  }
  MT_INLINE __m512 load(const T* from) {
    return bound_value(_mm512_cvtepu16_epi32(load_halves(from)));
  }
  MT_INLINE void store(T* to, __mmask16 mask, __m512i raw) {
    _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(raw));
  }
  MT_INLINE __m512 end(__m512 x, bool) { return x; }
  // To the nearest, ties to even; NaN stays NaN, for those here have no more bits than a bf16's.
  MT_INLINE __m512 rounded(__m512 x) {
    const __m512i bits = as_bits(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, splat(0x7FFF)), odd);
    return as_floats(_mm512_andnot_si512(splat(0xFFFF), sum));
  }
  MT_INLINE __m512i raw(__m512 x) { return _mm512_srli_epi32(as_bits(x), 16); }
  // Half of a number with 16 bits is exact in float32: rounded once, as the difference alone.
  MT_INLINE __m512 half_less(__m512 x, __m512 base) {
    return _mm512_fmsub_ps(x, splat(0.5f), base);
  }
};

struct Halves : Bfloats {
  MT_INLINE __m512 load(const T* from, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
  }
  MT_INLINE __m512 load(const T* from) { return _mm512_cvtph_ps(load_halves(from)); }
  MT_INLINE __m512i bound_bits(__m512 x) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  MT_INLINE __m512 bound_value(__m512i bits) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
  }
  MT_INLINE __m512 rounded(__m512 x) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  MT_INLINE __m512i raw(__m512 x) { return bound_bits(x); }
};

// -- levels and codes ----------------------------------------------------------------------------

struct Levels {
  __m512 of[4];
};

template <typename F>
MT_INLINE Levels levels_between(__m512 lo, __m512 hi) {
  const __m512 half = splat(0.5f);
  const __m512 range = _mm512_sub_ps(_mm512_mul_ps(half, hi), _mm512_mul_ps(half, lo));
  const __m512 third = _mm512_mul_ps(range, splat(0.6666666865348816f));
  return {lo, F::rounded(_mm512_add_ps(lo, third)), F::rounded(_mm512_sub_ps(hi, third)), hi};
}

// `lo` and `hi` are right where there is no NaN.
template <typename F>
MT_INLINE Levels levels_of(__m512 lo, __m512 hi, __mmask16 nan) {
  const __m512 infinite = splat(__builtin_inff());
  const __m512 least = _mm512_min_ps(_mm512_sub_ps(splat(0.0f), hi), lo);
  nan |= _mm512_cmp_ps_mask(least, _mm512_sub_ps(splat(0.0f), infinite), _CMP_LE_OQ);
  const __m512 none = as_floats(splat(0x7FC00000));
  // Adding 0 turns -0 into 0: which of the two a minimum finds depends on the order.
  lo = _mm512_mask_mov_ps(_mm512_add_ps(F::end(lo, false), splat(0.0f)), nan, none);
  hi = _mm512_mask_mov_ps(_mm512_add_ps(F::end(hi, true), splat(0.0f)), nan, none);
  return levels_between<F>(lo, hi);
}

// What a value is compared with: where its interval begins, and how wide it is. Halves, since a
// difference may overflow.
struct Steps {
  __m512 base[3], width[3];
};

MT_INLINE Steps steps_of(const Levels& l, bool stochastic) {
  const __m512 half = splat(0.5f);
  Steps s;
#pragma GCC unroll 3
  for (int k = 0; k < 3; ++k) {
    s.base[k] = _mm512_mul_ps(half, l.of[k]);
    s.width[k] = _mm512_sub_ps(_mm512_mul_ps(half, l.of[k + 1]), s.base[k]);
    if (!stochastic) s.width[k] = _mm512_mul_ps(half, s.width[k]);
  }
  return s;
}

// Adds to `codes`, in units of `one`, how many levels lie far enough below x.
template <typename F>
MT_INLINE __m512i add_codes(__m512i codes, __m512 x, const Steps& s, __m512i one) {
#pragma GCC unroll 3
  for (int k = 0; k < 3; ++k) {
    const __m512 above = F::half_less(x, s.base[k]);
    const __mmask16 more = _mm512_cmp_ps_mask(above, s.width[k], _CMP_GE_OQ);
    codes = _mm512_mask_add_epi32(codes, more, codes, one);
  }
  return codes;
}

MT_INLINE Steps scaled(const Steps& s, __m512i draw) {
  // (draw + 0.5) / 2**16: exact, so fused or not is the same.
  const __m512 u = _mm512_fmadd_ps(_mm512_cvtepi32_ps(draw), splat(0x1p-16f), splat(0x1p-17f));
  Steps scaled = s;
#pragma GCC unroll 3
  for (int k = 0; k < 3; ++k) scaled.width[k] = _mm512_mul_ps(u, s.width[k]);
  return scaled;
}

MT_INLINE __m512 smaller(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
MT_INLINE __m512 larger(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }

MT_INLINE __mmask16 unordered(__m512 a, __m512 b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}

struct Draws {
  __m512i word[2][4];
};

constexpr int kTogether = 4;

// Sixteen patches on their way to words.
struct Patches {
  __m512 x[4][4], lo, hi;
  __mmask16 nan;
  __m512i bounds;
  Steps steps;
};

template <typename F>
MT_INLINE void find_bounds(Patches& p, bool stochastic) {
  const Levels l = levels_of<F>(p.lo, p.hi, p.nan);
  p.bounds = _mm512_or_si512(F::bound_bits(l.of[0]), _mm512_slli_epi32(F::bound_bits(l.of[3]), 16));
  p.steps = steps_of(l, stochastic);
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

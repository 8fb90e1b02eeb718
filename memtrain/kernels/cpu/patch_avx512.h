// Rows of sixteen patches, wherever they lie, to cells and back with AVX-512: four values a load,
// masked where a patch is partial, and turned in registers. Cells as in patch.cpp.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MT_PATCH_AVX512
#include <immintrin.h>

#include "common.h"

// Defined in codebook.cpp: 2 where the machine has AVX-512 and it is not switched off.
MT_EXPORT int mt_isa();

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c")

namespace memtrain::avx512 {
namespace {

// Where sixteen patches begin, and how much of each there is: a bit a column, and the rows; `step`
// from a row to the next.
struct Places {
  int64_t at[16], step;
  uint8_t mask[16], height[16];
};

// Four values of a row; what is missing repeats the first.
struct Floats {
  using T = uint32_t;
  MT_INLINE __m128 four(const T* from, __mmask8 mask) {
    const __m128 x = _mm_maskz_loadu_ps(mask, from);
    return _mm_mask_broadcastss_ps(x, static_cast<__mmask8>(~mask), x);
  }
};

MT_INLINE __m128i four_halves(const uint16_t* from, __mmask8 mask) {
  const __m128i x = _mm_maskz_loadu_epi16(mask, from);
  return _mm_mask_broadcastw_epi16(x, static_cast<__mmask8>(~mask), x);
}

struct Bfloats {
  using T = uint16_t;
  MT_INLINE __m128 four(const T* from, __mmask8 mask) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(four_halves(from, mask)), 16));
  }
};

struct Halves {
  using T = uint16_t;
  MT_INLINE __m128 four(const T* from, __mmask8 mask) {
    return _mm_cvtph_ps(four_halves(from, mask));
  }
};

MT_INLINE __m512 low_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

MT_INLINE __m512 high_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

// In each quarter of the registers, four rows of four to four columns of four, or back.
MT_INLINE void turn(__m512* z) {
  const __m512 low01 = _mm512_unpacklo_ps(z[0], z[1]), high01 = _mm512_unpackhi_ps(z[0], z[1]);
  const __m512 low23 = _mm512_unpacklo_ps(z[2], z[3]), high23 = _mm512_unpackhi_ps(z[2], z[3]);
  z[0] = low_pairs(low01, low23);
  z[1] = high_pairs(low01, low23);
  z[2] = low_pairs(high01, high23);
  z[3] = high_pairs(high01, high23);
}

template <typename F>
MT_INLINE __m128 row_of(const typename F::T* from, const Places& p, int r, int i) {
  return F::four(from + p.at[i] + (r < p.height[i] ? r * p.step : 0), p.mask[i]);
}

template <typename F>
MT_INLINE void load_cells(const typename F::T* from, const Places& p, float (*cells)[16]) {
  for (int r = 0; r < 4; ++r) {
    __m512 z[4];
    // Patch 4 q + k goes to quarter q of register k.
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      z[k] = _mm512_castps128_ps512(row_of<F>(from, p, r, k));
      z[k] = _mm512_insertf32x4(z[k], row_of<F>(from, p, r, k + 4), 1);
      z[k] = _mm512_insertf32x4(z[k], row_of<F>(from, p, r, k + 8), 2);
      z[k] = _mm512_insertf32x4(z[k], row_of<F>(from, p, r, k + 12), 3);
    }
    turn(z);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) _mm512_storeu_ps(cells[4 * r + k], z[k]);
  }
}

template <typename T>
MT_INLINE void put_row(T* to, const Places& p, int r, int i, __m128i four) {
  if (r >= p.height[i]) return;
  T* at = to + p.at[i] + r * p.step;
  if constexpr (sizeof(T) == 2)
    _mm_mask_storeu_epi16(at, p.mask[i], _mm_cvtepi32_epi16(four));
  else
    _mm_mask_storeu_epi32(at, p.mask[i], four);
}

template <typename T>
MT_INLINE void store_cells(T* to, const Places& p, const uint32_t (*cells)[16]) {
  for (int r = 0; r < 4; ++r) {
    __m512 z[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) z[k] = _mm512_loadu_ps(cells[4 * r + k]);
    turn(z);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512i patch = _mm512_castps_si512(z[k]);
      put_row(to, p, r, k, _mm512_castsi512_si128(patch));
      put_row(to, p, r, k + 4, _mm512_extracti32x4_epi32(patch, 1));
      put_row(to, p, r, k + 8, _mm512_extracti32x4_epi32(patch, 2));
      put_row(to, p, r, k + 12, _mm512_extracti32x4_epi32(patch, 3));
    }
  }
}

void load(const uint32_t* from, const Places& p, float (*cells)[16], bool) {
  load_cells<Floats>(from, p, cells);
}

void load(const uint16_t* from, const Places& p, float (*cells)[16], bool half) {
  if (half)
    load_cells<Halves>(from, p, cells);
  else
    load_cells<Bfloats>(from, p, cells);
}

void store(uint32_t* to, const Places& p, const uint32_t (*cells)[16]) {
  store_cells(to, p, cells);
}

void store(uint16_t* to, const Places& p, const uint32_t (*cells)[16]) {
  store_cells(to, p, cells);
}

}  // namespace
}  // namespace memtrain::avx512

#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

// 4x4 patches of maps with one channel, 16 bits a value, to the nearest level: values are compared
// as integers, thirty-two at a time. Pairs of quads side by side: quads_avx512.h.
#pragma once

#include "patch/quads_avx512.h"

#ifdef MT_X86
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

// -- keys: integers in the order of the numbers; both zeros are 0 --------------------------------

// Of 16-bit numbers with these bits, and back.
MT_INLINE __m512i keys_of_halves(__m512i bits) {
  const __m512i top = _mm512_set1_epi16(-0x8000);
  return _mm512_mask_sub_epi16(bits, _mm512_movepi16_mask(bits), top, bits);
}

// The same in the lower half of each lane, of keys with a sign and of bits without.
MT_INLINE __m512i key_of_half(__m512i bits) {
  const __mmask16 negative = _mm512_test_epi32_mask(bits, splat(0x8000));
  return _mm512_mask_sub_epi32(bits, negative, splat(0x8000), bits);
}

MT_INLINE __m512i half_of_key(__m512i key) {
  return _mm512_mask_sub_epi32(key, _mm512_movepi32_mask(key), splat(0x8000), key);
}

// The bits of the least 16-bit number that is not below x, and the key of Infinity.
MT_INLINE __m512i half_above(Bfloats, __m512 x) {
  const __m512i bits = as_bits(x);
  const __mmask16 positive = static_cast<__mmask16>(~_mm512_movepi32_mask(bits));
  return _mm512_srli_epi32(_mm512_mask_add_epi32(bits, positive, bits, splat(0xFFFF)), 16);
}
MT_INLINE __m512i half_above(Halves, __m512 x) {
  return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
}
constexpr int infinity_of(Bfloats) { return 0x7F80; }
constexpr int infinity_of(Halves) { return 0x7C00; }

// Differences of numbers that are not smaller than this part of them fit a float32.
constexpr float part_of(Bfloats) { return 0x1p-14f; }
constexpr float part_of(Halves) { return 0x1p-11f; }

// Sixteen patches: pairs of quads with a row's keys in each register, and what each patch has one
// of in lanes 4 q + 2 i + p, for patch 2 q + p of pair i.
struct KeyPatches {
  __m512i row[2][4];
  __m512i lo, hi;    // keys
  __m512i bounds;    // as words have them
  __m512i below[3];  // the greatest keys that stay below the next level
  bool known;        // whether `below` is surely right
};

template <typename T, typename Job>
MT_INLINE __m512i load_pair(const Job& job, const Quads& q, int i, int r) {
  const T* from = static_cast<const T*>(job.from);
  const T* two[2];
  __m256i half[2];
#pragma GCC unroll 2
  for (int k = 0; k < 2; ++k) {
    const int j = 2 * i + k;
    two[k] = from + q.at[j] + (r < q.height[j] ? r * job.columns : 0);
    half[k] = _mm256_maskz_loadu_epi16(q.columns[j], two[k]);
    const __m256i lane = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i first = _mm256_and_si256(lane, _mm256_set1_epi16(~3));
    half[k] = _mm256_permutexvar_epi16(_mm256_mask_mov_epi16(first, q.columns[j], lane), half[k]);
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}

template <typename T, typename Job>
MT_INLINE __m512i load_whole_pair(const Job& job, const Quads& q, int i, int r) {
  const T* from = static_cast<const T*>(job.from) + r * job.columns;
  const T *first = from + q.at[2 * i], *second = from + q.at[2 * i + 1];
  fetch(first);
  if (second == first + 16) return _mm512_loadu_si512(first);
  fetch(second);
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_halves(first)), load_halves(second), 1);
}

// One key a patch from four in a register of each pair.
template <typename Op>
MT_INLINE __m512i reduce_pairs(__m512i a, __m512i b, const Op& op) {
  const __m512 x = as_floats(a), y = as_floats(b);
  const __m512 even = _mm512_shuffle_ps(x, y, 0x88), odd = _mm512_shuffle_ps(x, y, 0xDD);
  const __m512i two = op(as_bits(even), as_bits(odd));
  return _mm512_srai_epi32(op(two, _mm512_rol_epi32(two, 16)), 16);
}

MT_INLINE __m512i smaller_keys(__m512i a, __m512i b) { return _mm512_min_epi16(a, b); }
MT_INLINE __m512i larger_keys(__m512i a, __m512i b) { return _mm512_max_epi16(a, b); }

template <typename T, typename Job>
MT_INLINE void load_keys(const Job& job, const Quads& q, KeyPatches& p) {
  __m512i lo[2], hi[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    if (q.whole)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) p.row[i][r] = keys_of_halves(load_whole_pair<T>(job, q, i, r));
    else
      for (int r = 0; r < 4; ++r) p.row[i][r] = keys_of_halves(load_pair<T>(job, q, i, r));
    const __m512i* x = p.row[i];
    lo[i] = smaller_keys(smaller_keys(x[0], x[1]), smaller_keys(x[2], x[3]));
    hi[i] = larger_keys(larger_keys(x[0], x[1]), larger_keys(x[2], x[3]));
  }
  p.lo = reduce_pairs(lo[0], lo[1], smaller_keys), p.hi = reduce_pairs(hi[0], hi[1], larger_keys);
}

// Where intervals between levels are divided: the first number from the middle on. All is exact,
// unless a level other than 0 is far smaller than another.
template <typename F>
MT_INLINE void find_limits(KeyPatches& p) {
  const __mmask16 nan = _mm512_cmpge_epi32_mask(p.hi, splat(infinity_of(F()))) |
                        _mm512_cmple_epi32_mask(p.lo, splat(-infinity_of(F())));
  const __m512 none = as_floats(splat(0x7FC00000)), half = splat(0.5f), zero = splat(0.0f);
  const __m512 lo = _mm512_mask_mov_ps(F::bound_value(half_of_key(p.lo)), nan, none);
  const __m512 hi = _mm512_mask_mov_ps(F::bound_value(half_of_key(p.hi)), nan, none);
  const Levels l = levels_between<F>(lo, hi);
  p.bounds = _mm512_or_si512(F::bound_bits(lo), _mm512_slli_epi32(F::bound_bits(hi), 16));
  const __m512 range = _mm512_sub_ps(_mm512_mul_ps(half, hi), _mm512_mul_ps(half, lo));
  const __m512 part = _mm512_mul_ps(range, splat(part_of(F())));
  int small = 0;
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k)
    small |= _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(_mm512_abs_ps(l.of[k]), part, _CMP_LT_OQ),
                                     l.of[k], zero, _CMP_NEQ_OQ);
  p.known = small == 0;
#pragma GCC unroll 3
  for (int k = 0; k < 3; ++k) {
    const __m512 base = _mm512_mul_ps(half, l.of[k]);
    const __m512 width = _mm512_sub_ps(_mm512_mul_ps(half, l.of[k + 1]), base);
    __m512 middle = _mm512_add_ps(l.of[k], width);
    // Between a number and its opposite a difference is rounded to the width already before 0.
    const __mmask16 crossed = _mm512_mask_cmp_ps_mask(
        _mm512_cmp_ps_mask(middle, zero, _CMP_EQ_OQ), width, zero, _CMP_GT_OQ);
    const __m512 steps = _mm512_mul_ps(half, width);
    const __m512 less = as_floats(_mm512_sub_epi32(as_bits(steps), splat(1)));
    middle = _mm512_mask_sub_ps(middle, crossed, less, steps);
    const __m512i below = _mm512_sub_epi32(key_of_half(half_above(F(), middle)), splat(1));
    p.below[k] = _mm512_mask_mov_epi32(below, nan, splat(0x7FFF));
  }
}

// The codes of sixteen patches, as words have them.
MT_INLINE __m512i encode_keys(const KeyPatches& p) {
  const __m512i spread = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5));
  const __m512i one = _mm512_set1_epi64(0x0040001000040001);
  __m512 pair[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m512i below[3], half[2];
#pragma GCC unroll 3
    for (int k = 0; k < 3; ++k)
      below[k] = _mm512_shuffle_epi8(p.below[k], _mm512_add_epi8(spread, _mm512_set1_epi8(8 * i)));
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      __m512i codes = r % 2 ? half[r / 2] : _mm512_setzero_si512();
      const __m512i unit = r % 2 ? _mm512_slli_epi16(one, 8) : one;
#pragma GCC unroll 3
      for (int k = 0; k < 3; ++k) {
        const __mmask32 more = _mm512_cmpgt_epi16_mask(p.row[i][r], below[k]);
        codes = _mm512_mask_add_epi16(codes, more, codes, unit);
      }
      half[r / 2] = codes;
    }
    // Two columns together: codes of the upper rows in the lower half.
    const __m512i ones = _mm512_set1_epi16(1), low = splat(0xFFFF);
    const __m512i upper = _mm512_madd_epi16(half[0], ones);
    const __m512i lower = _mm512_slli_epi32(_mm512_madd_epi16(half[1], ones), 16);
    pair[i] = as_floats(_mm512_ternarylogic_epi32(low, upper, lower, 0xCA));  // a ? b : c
  }
  return _mm512_or_si512(as_bits(_mm512_shuffle_ps(pair[0], pair[1], 0x88)),
                         as_bits(_mm512_shuffle_ps(pair[0], pair[1], 0xDD)));
}

MT_INLINE void store_pairs(uint64_t* to, const Quads& q, __m512i bounds, __m512i codes) {
  const __m512i low = _mm512_unpacklo_epi32(bounds, codes);
  store_quads(to, q, low, _mm512_unpackhi_epi32(bounds, codes));
}

// As `quantize_quads` does it.
template <typename F, typename Job>
__attribute__((noinline)) void quantize_four(const Job& job, const Quads& q) {
  Patches p;
  load_patches<F>(job, q, p);
  find_bounds<F>(p, false);
  store_words(static_cast<uint64_t*>(job.to), q, p.bounds,
              encode_quads<F, false>(p.x, p.steps, Draws()));
}

template <typename F, typename Job>
void quantize_nearest(const Job& job, int64_t begin, int64_t end) {
  QuadIterator<Job> it(job, begin);
  KeyPatches p[kTogether];
  Quads q[kTogether];
  while (begin < end) {
    int count = 0;
    for (; count < kTogether && begin < end; ++count, begin += 4) {
      q[count] = it.four(end - begin);
      load_keys<typename F::T>(job, q[count], p[count]);
    }
    for (int k = 0; k < count; ++k) find_limits<F>(p[k]);
    for (int k = 0; k < count; ++k)
      if (p[k].known)
        store_pairs(static_cast<uint64_t*>(job.to), q[k], p[k].bounds, encode_keys(p[k]));
      else
        quantize_four<F>(job, q[k]);
  }
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

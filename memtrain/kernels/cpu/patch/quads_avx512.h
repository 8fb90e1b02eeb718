// 4x4 patches of maps with one channel. Values stay in memory order: a quad is a row's up to four
// patches side by side, and in the numbers that each patch has one of (bounds, levels, codes) lane
// 4 q + j is patch q of quad j.
#pragma once

#include "patch/quad_iterator_avx512.h"

#ifdef MT_X86
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

MT_INLINE __m512 low_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

MT_INLINE __m512 high_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

// In each quarter of the registers, four rows of four to four columns of four.
MT_INLINE void turn(__m512* z) {
  const __m512 low01 = _mm512_unpacklo_ps(z[0], z[1]), high01 = _mm512_unpackhi_ps(z[0], z[1]);
  const __m512 low23 = _mm512_unpacklo_ps(z[2], z[3]), high23 = _mm512_unpackhi_ps(z[2], z[3]);
  z[0] = low_pairs(low01, low23);
  z[1] = high_pairs(low01, low23);
  z[2] = low_pairs(high01, high23);
  z[3] = high_pairs(high01, high23);
}

// The rows of each quad; what is missing of a patch repeats its first row or column.
template <typename F, typename Job>
MT_INLINE void load_quads(const Job& job, const Quads& q, __m512 (*x)[4]) {
  const auto* from = static_cast<const typename F::T*>(job.from);
  const __m512i first = _mm512_and_si512(lanes(), splat(~3));
  if (q.whole) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const auto* row = from + q.at[j] + r * job.columns;
        fetch(row);
        x[j][r] = F::load(row);
      }
    return;
  }
  for (int j = 0; j < 4; ++j) {
    const auto* quad = from + q.at[j];
    const __m512i index = _mm512_mask_mov_epi32(first, q.columns[j], lanes());
    for (int r = 0; r < 4; ++r) {
      const __m512 row = F::load(quad + (r < q.height[j] ? r * job.columns : 0), q.columns[j]);
      x[j][r] = _mm512_permutexvar_ps(index, row);
    }
  }
}

// One number a patch from sixteen.
template <typename Op>
MT_INLINE __m512 reduce_quads(const __m512 (*x)[4], const Op& op) {
  __m512 z[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) z[j] = op(op(x[j][0], x[j][1]), op(x[j][2], x[j][3]));
  turn(z);
  return op(op(z[0], z[1]), op(z[2], z[3]));
}

MT_INLINE __mmask16 nan_quads(const __m512 (*x)[4]) {
  __mmask16 nan[4], some = 0;
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    nan[j] = unordered(x[j][0], x[j][1]) | unordered(x[j][2], x[j][3]);
    some |= nan[j];
  }
  if (__builtin_expect(some == 0, 1)) return 0;
  int patches = 0;
  for (int j = 0; j < 4; ++j)
    for (int q = 0; q < 4; ++q) patches |= (nan[j] >> (4 * q) & 15 ? 1 : 0) << (4 * q + j);
  return static_cast<__mmask16>(patches);
}

// Quad j's number of each patch in the lanes of its values.
MT_INLINE __m512 spread(__m512 x, int j) { return _mm512_permutevar_ps(x, splat(j)); }

MT_INLINE Steps spread(const Steps& s, int j) {
  Steps own;
#pragma GCC unroll 3
  for (int k = 0; k < 3; ++k) {
    own.base[k] = spread(s.base[k], j);
    own.width[k] = spread(s.width[k], j);
  }
  return own;
}

MT_INLINE Draws draw_quads(const Quads& q, const Keys& keys, uint32_t patches) {
  const auto first = [&](int j) { return static_cast<int>(q.first[j]); };
  const __m512i starts =
      _mm512_broadcast_i32x4(_mm_setr_epi32(first(0), first(1), first(2), first(3)));
  Draws d;
  d.word[0][0] = _mm512_add_epi32(starts, _mm512_srli_epi32(lanes(), 2));
  d.word[1][0] = _mm512_add_epi32(d.word[0][0], splat(static_cast<int>(patches)));
  draw_at<2>(keys, d.word);
  return d;
}

// The 16 bits of each value of row r of quad j: two words hold a row of a patch.
MT_INLINE __m512i draws_of_row(const Draws& d, int j, int r) {
  const __m512i pick = _mm512_add_epi32(
      _mm512_setr_epi32(0, 0, 16, 16, 4, 4, 20, 20, 8, 8, 24, 24, 12, 12, 28, 28), splat(j));
  const __m512i* word = d.word[r / 2] + r % 2 * 2;
  const __m512i both = _mm512_permutex2var_epi32(word[0], pick, word[1]);
  const __m512i shift = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 16, 0, 16));
  return _mm512_and_si512(_mm512_srlv_epi32(both, shift), splat(0xFFFF));
}

template <typename F, bool kStochastic>
MT_INLINE __m512i encode_quads(const __m512 (*x)[4], const Steps& steps, const Draws& draws) {
  __m512 z[4];
  const __m512i columns = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 2, 4, 6));
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Steps own = spread(steps, j);
    __m512i codes = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Steps row = kStochastic ? scaled(own, draws_of_row(draws, j, r)) : own;
      codes = add_codes<F>(codes, x[j][r], row, splat(1 << (8 * r)));
    }
    z[j] = as_floats(_mm512_sllv_epi32(codes, columns));
  }
  turn(z);
  return as_bits(_mm512_or_ps(_mm512_or_ps(z[0], z[1]), _mm512_or_ps(z[2], z[3])));
}

MT_INLINE __m512i words_of_quads(int j) {
  const __m512i first = _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 1, 17, 5, 21, 9, 25, 13, 29);
  return _mm512_add_epi32(first, splat(j));
}

// The words of the first two quads and of the last two.
MT_INLINE void store_quads(uint64_t* to, const Quads& q, __m512i low, __m512i high) {
  if (q.in_a_row) {
    _mm512_storeu_si512(to + q.first[0], low);
    return _mm512_storeu_si512(to + q.first[0] + 8, high);
  }
  _mm256_mask_storeu_epi64(to + q.first[0], q.patches[0], _mm512_castsi512_si256(low));
  _mm256_mask_storeu_epi64(to + q.first[1], q.patches[1], _mm512_extracti64x4_epi64(low, 1));
  _mm256_mask_storeu_epi64(to + q.first[2], q.patches[2], _mm512_castsi512_si256(high));
  _mm256_mask_storeu_epi64(to + q.first[3], q.patches[3], _mm512_extracti64x4_epi64(high, 1));
}

MT_INLINE void store_words(uint64_t* to, const Quads& q, __m512i bounds, __m512i codes) {
  store_quads(to, q, _mm512_permutex2var_epi32(bounds, words_of_quads(0), codes),
              _mm512_permutex2var_epi32(bounds, words_of_quads(2), codes));
}

template <typename F, typename Job>
MT_INLINE void load_patches(const Job& job, const Quads& q, Patches& p) {
  load_quads<F>(job, q, p.x);
  p.lo = reduce_quads(p.x, smaller), p.hi = reduce_quads(p.x, larger);
  p.nan = nan_quads(p.x);
}

// A few sixteens at a time, each step for all of them: one by one, each would wait for its levels.
template <typename F, bool kStochastic, typename Job>
void quantize_quads(const Job& job, int64_t begin, int64_t end) {
  const Keys keys = keys_of(job.seed);
  const uint32_t patches = static_cast<uint32_t>(job.patches());
  QuadIterator<Job> it(job, begin);
  Patches p[kTogether];
  Quads q[kTogether];
  while (begin < end) {
    int count = 0;
    for (; count < kTogether && begin < end; ++count, begin += 4) {
      q[count] = it.four(end - begin);
      load_patches<F>(job, q[count], p[count]);
    }
    for (int k = 0; k < count; ++k) find_bounds<F>(p[k], kStochastic);
    for (int k = 0; k < count; ++k) {
      const Draws draws = kStochastic ? draw_quads(q[k], keys, patches) : Draws();
      const __m512i codes = encode_quads<F, kStochastic>(p[k].x, p[k].steps, draws);
      store_words(static_cast<uint64_t*>(job.to), q[k], p[k].bounds, codes);
    }
  }
}

MT_INLINE __m512i load_words(const uint64_t* from, const Quads& q, int j) {
  const __m256i a = _mm256_maskz_loadu_epi64(q.patches[j], from + q.first[j]);
  const __m256i b = _mm256_maskz_loadu_epi64(q.patches[j + 1], from + q.first[j + 1]);
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// Floats: a quad's sixteen levels fill a register.
template <typename Job>
MT_INLINE void decode_quads(const Job& job, const Quads& q, const __m512i* words, __m512* table,
                            uint32_t* to) {
  const __m512i pick = _mm512_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7);
  const __m512i patch = _mm512_and_si512(lanes(), splat(12));
  const __m512i column = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 2, 4, 6));
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i own = _mm512_add_epi32(pick, splat(j % 2 * 8));
    const __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(own, words[j / 2]), column);
    if (q.patches[j] == 0) continue;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const __m512i shifted = _mm512_srli_epi32(codes, 8 * r);
      const __m512i index = _mm512_ternarylogic_epi32(shifted, splat(3), patch, 0xEA);  // a & b | c
      const __m512 value = _mm512_permutexvar_ps(index, table[j]);
      if (r < q.height[j])
        _mm512_mask_storeu_ps(to + q.at[j] + r * job.columns, q.columns[j], value);
    }
  }
}

// 16 bits: two patches' levels fill a quarter, low bytes and high bytes apart.
template <typename Job>
MT_INLINE void decode_quads(const Job& job, const Quads& q, const __m512i* words, __m512* table,
                            uint16_t* to) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, -1, -1, -1,
                                                             -1, -1, -1, -1, -1));
  const __m512i pairs = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
  const __m512i place = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0x0400, 0x0400, 0x0400, 0x0400, 0x0C08, 0x0C08, 0x0C08, 0x0C08));
  const __m512i row = _mm512_broadcast_i32x4(
      _mm_setr_epi8(4, 4, 4, 4, 4, 4, 4, 4, 12, 12, 12, 12, 12, 12, 12, 12));
  const __m512i column = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 2, 4, 6, 0, 2, 4, 6));
#pragma GCC unroll 2
  for (int j = 0; j < 4; j += 2) {
    const __m512i levels = _mm512_permutex2var_epi64(
        _mm512_shuffle_epi8(as_bits(table[j]), bytes), pairs,
        _mm512_shuffle_epi8(as_bits(table[j + 1]), bytes));
    const int64_t first = q.patches[j] ? q.height[j] : 0;
    const int64_t second = q.patches[j + 1] ? q.height[j + 1] : 0;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      // A row's eight bits of a patch, in both bytes of each of its values, so that shifted by a
      // column's place each byte has the code in its lowest bits.
      const __m512i bits = _mm512_add_epi8(row, _mm512_set1_epi8(static_cast<char>(r)));
      const __m512i codes = _mm512_shuffle_epi8(words[j / 2], bits);
      const __m512i shifted = _mm512_srlv_epi16(codes, column);
      const __m512i index =
          _mm512_ternarylogic_epi32(shifted, splat(0x03030303), place, 0xEA);  // a & b | c
      const __m512i value = _mm512_shuffle_epi8(levels, index);
      uint16_t* at = to + r * job.columns;
      if (r < first)
        _mm256_mask_storeu_epi16(at + q.at[j], q.columns[j], _mm512_castsi512_si256(value));
      if (r < second)
        _mm256_mask_storeu_epi16(at + q.at[j + 1], q.columns[j + 1],
                                 _mm512_extracti64x4_epi64(value, 1));
    }
  }
}

template <typename F, typename Job>
void dequantize_quads(const Job& job, int64_t begin, int64_t end) {
  const __m512i bounds_of_words =
      _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30);
  const auto* from = static_cast<const uint64_t*>(job.from);
  QuadIterator<Job> it(job, begin);
  for (; begin < end; begin += 4) {
    const Quads q = it.four(end - begin);
    const __m512i words[2] = {load_words(from, q, 0), load_words(from, q, 2)};
    const __m512i bounds = _mm512_permutex2var_epi32(words[0], bounds_of_words, words[1]);
    const Levels l = levels_between<F>(F::bound_value(_mm512_and_si512(bounds, splat(0xFFFF))),
                                       F::bound_value(_mm512_srli_epi32(bounds, 16)));
    __m512 table[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) table[k] = as_floats(F::raw(l.of[k]));
    turn(table);
    decode_quads(job, q, words, table, static_cast<typename F::T*>(job.to));
  }
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

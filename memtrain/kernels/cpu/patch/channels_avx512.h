// 4x4 patches of maps with several channels: a lane is a channel.
#pragma once

#include "patch/patch_avx512.h"

#ifdef MT_X86
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

// The places of a patch's cells, and which of up to sixteen channels there are.
struct Channels {
  int64_t at, height, width;
  int64_t patch;  // the number of the first channel's
  __mmask16 mask;
};

// Goes through the positions of patches, and at each through its channels by sixteens.
template <typename Job>
struct ChannelIterator {
  const Job& job;
  int64_t pieces, piece, column, row, at, patch;

  ChannelIterator(const Job& of, int64_t from) : job(of), pieces((of.inner + 15) / 16) {
    const int64_t place = from / pieces, band = place / job.across();
    piece = from % pieces, column = place % job.across(), row = band % job.down();
    at = ((band / job.down() * job.rows + row * 4) * job.columns + column * 4) * job.inner;
    patch = place * job.inner;
  }
  Channels next() {
    const int64_t left = job.inner - piece * 16;
    const Channels c{at + piece * 16, std::min<int64_t>(job.rows - row * 4, 4),
                     std::min<int64_t>(job.columns - column * 4, 4), patch + piece * 16,
                     static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1 << left) - 1)};
    if (++piece < pieces) return c;
    piece = 0, patch += job.inner;
    at += c.width * job.inner;
    if (++column < job.across()) return c;
    column = 0, at += (c.height - 1) * job.columns * job.inner;
    if (++row == job.down()) row = 0;
    return c;
  }
};

// Sixteen channels of each cell; what is missing of a patch repeats its first row or column.
template <typename F, typename Job>
MT_INLINE void load_channels(const Job& job, const Channels& c, __m512 (*x)[4]) {
  const auto* from = static_cast<const typename F::T*>(job.from) + c.at;
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const auto* row = from + (r < c.height ? r * job.columns * job.inner : 0);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const auto* cell = row + (k < c.width ? k * job.inner : 0);
      fetch(cell);
      x[r][k] = F::load(cell, c.mask);
    }
  }
}

template <typename Op>
MT_INLINE __m512 reduce_channels(const __m512 (*x)[4], const Op& op) {
  __m512 z[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) z[r] = op(op(x[r][0], x[r][1]), op(x[r][2], x[r][3]));
  return op(op(z[0], z[1]), op(z[2], z[3]));
}

MT_INLINE __mmask16 nan_channels(const __m512 (*x)[4]) {
  int nan = 0;
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) nan |= unordered(x[r][0], x[r][1]) | unordered(x[r][2], x[r][3]);
  return static_cast<__mmask16>(nan);
}

MT_INLINE Draws draw_channels(int64_t patch, const Keys& keys, uint32_t patches) {
  Draws d;
  d.word[0][0] = _mm512_add_epi32(splat(static_cast<int>(patch)), lanes());
  d.word[1][0] = _mm512_add_epi32(d.word[0][0], splat(static_cast<int>(patches)));
  draw_at<2>(keys, d.word);
  return d;
}

template <typename F, bool kStochastic>
MT_INLINE __m512i encode_channels(const __m512 (*x)[4], const Steps& steps, const Draws& draws) {
  __m512i codes = _mm512_setzero_si512();
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
    const __m512i word = draws.word[k / 8][k % 8 / 2];
    const __m512i own = k % 2 ? _mm512_srli_epi32(word, 16) : _mm512_and_si512(word, splat(0xFFFF));
    codes = add_codes<F>(codes, x[k / 4][k % 4], kStochastic ? scaled(steps, own) : steps,
                      splat(static_cast<int>(1u << (2 * k))));
  }
  return codes;
}

MT_INLINE void store_words(uint64_t* to, const Channels& c, __m512i bounds, __m512i codes) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, splat(8));
  _mm512_mask_storeu_epi64(to + c.patch, static_cast<__mmask8>(c.mask),
                           _mm512_permutex2var_epi32(bounds, low, codes));
  _mm512_mask_storeu_epi64(to + c.patch + 8, static_cast<__mmask8>(c.mask >> 8),
                           _mm512_permutex2var_epi32(bounds, high, codes));
}

template <typename F, bool kStochastic, typename Job>
void quantize_channels(const Job& job, int64_t begin, int64_t end) {
  const Keys keys = keys_of(job.seed);
  const uint32_t patches = static_cast<uint32_t>(job.patches());
  ChannelIterator<Job> it(job, begin);
  Patches p[kTogether];
  Channels c[kTogether];
  while (begin < end) {
    int count = 0;
    for (; count < kTogether && begin < end; ++count, ++begin) {
      Patches& some = p[count];
      c[count] = it.next();
      load_channels<F>(job, c[count], some.x);
      some.lo = reduce_channels(some.x, smaller), some.hi = reduce_channels(some.x, larger);
      some.nan = nan_channels(some.x);
    }
    for (int k = 0; k < count; ++k) find_bounds<F>(p[k], kStochastic);
    for (int k = 0; k < count; ++k) {
      const Draws draws = kStochastic ? draw_channels(c[k].patch, keys, patches) : Draws();
      const __m512i codes = encode_channels<F, kStochastic>(p[k].x, p[k].steps, draws);
      store_words(static_cast<uint64_t*>(job.to), c[k], p[k].bounds, codes);
    }
  }
}

template <typename F, typename Job>
void dequantize_channels(const Job& job, int64_t begin, int64_t end) {
  const auto* from = static_cast<const uint64_t*>(job.from);
  const __m512i even = _mm512_slli_epi32(lanes(), 1), odd = _mm512_add_epi32(even, splat(1));
  ChannelIterator<Job> it(job, begin);
  for (; begin < end; ++begin) {
    const Channels c = it.next();
    auto* to = static_cast<typename F::T*>(job.to) + c.at;
    const __m512i a = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(c.mask), from + c.patch);
    const __m512i b =
        _mm512_maskz_loadu_epi64(static_cast<__mmask8>(c.mask >> 8), from + c.patch + 8);
    const __m512i bounds = _mm512_permutex2var_epi32(a, even, b);
    const __m512i codes = _mm512_permutex2var_epi32(a, odd, b);
    const Levels l = levels_between<F>(F::bound_value(_mm512_and_si512(bounds, splat(0xFFFF))),
                                       F::bound_value(_mm512_srli_epi32(bounds, 16)));
    __m512i raw[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) raw[k] = F::raw(l.of[k]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      if (r >= c.height) break;
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const int place = 2 * (4 * r + k);
        const __mmask16 upper = _mm512_test_epi32_mask(codes, splat(static_cast<int>(2u << place)));
        const __mmask16 next = _mm512_test_epi32_mask(codes, splat(static_cast<int>(1u << place)));
        const __m512i below = _mm512_mask_mov_epi32(raw[0], next, raw[1]);
        const __m512i above = _mm512_mask_mov_epi32(raw[2], next, raw[3]);
        if (k < c.width)
          F::store(to + (r * job.columns + k) * job.inner, c.mask,
                   _mm512_mask_mov_epi32(below, upper, above));
      }
    }
  }
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

// Philox with AVX-512: sixteen counters in a register (definition: kernels/random/philox.py).
#pragma once

#include "common.h"

#ifdef MT_X86
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

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

// Two for each of the ten rounds, and the product of the second round that no counter changes.
struct Keys {
  uint32_t of[20];
  uint64_t product;
};

[[maybe_unused]] Keys keys_of(uint64_t seed) {
  Keys keys;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  keys.product = uint64_t{0xD2511F53u} * k0;
  for (int i = 0; i < 20; i += 2, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    keys.of[i] = k0, keys.of[i + 1] = k1;
  return keys;
}

MT_INLINE __m512i every(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

// Ten rounds on the counters in words[n][0]: two at a time hide each other's waits. The counters'
// other words are 0, so that the first two rounds have half the products.
template <int N>
MT_INLINE void draw_at(const Keys& keys, __m512i (*words)[4]) {
  const __m512i m0 = every(0xD2511F53u), m1 = every(0xCD9E8D57u);
  const uint32_t high = static_cast<uint32_t>(keys.product >> 32);
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    __m512i* c = words[n];
    const Product p0 = Product::of(c[0], m0);
    const Product p1 = Product::of(_mm512_xor_si512(p0.high, every(keys.of[1])), m1);
    c[0] = _mm512_xor_si512(p1.high, every(keys.of[2]));
    c[1] = p1.low;
    c[2] = _mm512_xor_si512(p0.low, every(high ^ keys.of[3]));
    c[3] = every(static_cast<uint32_t>(keys.product));
  }
#pragma GCC unroll 8
  for (int round = 2; round < 10; ++round) {
    const __m512i key0 = every(keys.of[2 * round]), key1 = every(keys.of[2 * round + 1]);
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

// The words of 16 * N counters from `first` on.
template <int N>
MT_INLINE void draw(uint32_t first, const Keys& keys, __m512i (*words)[4]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n)
    words[n][0] = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first + 16u * n)), lane);
  draw_at<N>(keys, words);
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

// What sixteen lanes are in AVX-512: one register. Included by lanes.h.

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));

MT_INLINE F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
MT_INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
MT_INLINE F select(I where, F a, F b) { return where ? a : b; }
MT_INLINE I imax(I a, I b) { return a > b ? a : b; }
MT_INLINE I imin(I a, I b) { return a < b ? a : b; }

#define MT_UNROLL(n) _Pragma(MT_TEXT(GCC unroll n))
#define MT_HELPER MT_INLINE

MT_INLINE F splat(float x) { return (F)_mm512_set1_ps(x); }
MT_INLINE I splat_int(int32_t x) { return (I)_mm512_set1_epi32(x); }
// The second where one is NaN.
MT_INLINE F lesser(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
MT_INLINE F greater(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
MT_INLINE float least_of(F v) { return _mm512_reduce_min_ps((__m512)v); }
MT_INLINE float greatest_of(F v) { return _mm512_reduce_max_ps((__m512)v); }
MT_INLINE I to_int(F x) { return (I)_mm512_cvttps_epi32((__m512)x); }
MT_INLINE F to_float(I x) { return (F)_mm512_cvtepi32_ps((__m512i)x); }
MT_INLINE F look_up(const float* table, I at) {
  return (F)_mm512_i32gather_ps((__m512i)at, table, 4);
}
// The upper and the lower 32 bits of the products.
MT_INLINE void multiply(I x, uint32_t by, I& high, I& low) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(by));
  const __m512i even = _mm512_mul_epu32((__m512i)x, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), m);
  high = (I)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
  low = (I)_mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
}
MT_INLINE int32_t top_of(I v) { return _mm512_reduce_max_epi32((__m512i)v); }
MT_INLINE I widen(const uint8_t* p) {
  return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
MT_INLINE I widen(const uint16_t* p) {
  return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
MT_INLINE void narrow(uint16_t* p, I v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
}
MT_INLINE void narrow(uint8_t* p, I v) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
}
MT_INLINE F root(F x) { return (F)_mm512_sqrt_ps((__m512)x); }

// A codebook of 16 values and the 15 bounds between them (times the scale, where one scale
// serves a block).
struct Codebook {
  F values, t, t7, t3, t1;
};

MT_INLINE Codebook with_bounds(F values, F t) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  auto shifted = [&](int by) __attribute__((always_inline)) {
    return (F)_mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(by)), (__m512)t);
  };
  return {values, t, splat(t[7]), shifted(3), shifted(1)};
}

// Only the low 4 bits of an index count.
MT_INLINE F decode(F values, I index) {
  return (F)_mm512_permutexvar_ps((__m512i)index, (__m512)values);
}

// The same of four values, four times over: only the low 2 bits of an index count.
MT_INLINE F decode_two_bits(F values, I index) { return decode(values, index); }

// The number of bounds below x; NaN gives 0. The bounds ascend, so halving finds it in 4 steps.
MT_INLINE I encode(const Codebook& book, F x) {
  const __m512 v = (__m512)x;
  const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2);
  const __m512i four = _mm512_set1_epi32(4), eight = _mm512_set1_epi32(8);
  __mmask16 k = _mm512_cmp_ps_mask(v, (__m512)book.t7, _CMP_GT_OQ);
  __m512i c = _mm512_maskz_mov_epi32(k, eight);
  k = _mm512_cmp_ps_mask(v, _mm512_permutexvar_ps(c, (__m512)book.t3), _CMP_GT_OQ);
  c = _mm512_mask_or_epi32(c, k, c, four);
  k = _mm512_cmp_ps_mask(v, _mm512_permutexvar_ps(c, (__m512)book.t1), _CMP_GT_OQ);
  c = _mm512_mask_or_epi32(c, k, c, two);
  k = _mm512_cmp_ps_mask(v, _mm512_permutexvar_ps(c, (__m512)book.t), _CMP_GT_OQ);
  return (I)_mm512_mask_or_epi32(c, k, c, one);
}

MT_INLINE I plus_one(I x, __mmask16 where) {
  return (I)_mm512_mask_add_epi32((__m512i)x, where, (__m512i)x, _mm512_set1_epi32(1));
}

MT_INLINE F fused(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// The bytes of 64 lanes in [0, 255], by two steps; what is negative gives 0, as NaN made an integer
// does. `straight` puts them in order.
MT_INLINE __m512i pack_two(const I* x) {
  return _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]);
}

MT_INLINE __m512i pack_four(const __m512i* x) { return _mm512_packus_epi16(x[0], x[1]); }

MT_INLINE __m512i straight(__m512i bytes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

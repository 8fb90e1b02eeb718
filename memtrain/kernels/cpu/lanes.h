// Sixteen lanes, compiled once per instruction set: foreach_isa.h includes this file inside a
// namespace, so it has no include guard. Without AVX-512 GCC splits the vectors by itself.

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

#ifdef MT_AVX512
#define MT_UNROLL(n) _Pragma(MT_TEXT(GCC unroll n))
#define MT_HELPER MT_INLINE
#else
// Without 16-lane registers each operation is several: unrolled and inlined code would take
// gigabytes to compile.
#define MT_UNROLL(n) _Pragma("GCC unroll 1")
#define MT_HELPER static __attribute__((noinline, unused))
#endif

MT_INLINE F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
MT_INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
MT_INLINE F splat(float x) {
#ifdef MT_AVX512
  return (F)_mm512_set1_ps(x);
#else
  return F{} + x;
#endif
}
MT_INLINE I imax(I a, I b) { return a > b ? a : b; }
MT_INLINE I imin(I a, I b) { return a < b ? a : b; }
// Magnitudes compared as integers: NaN is above Inf is above every number.
MT_INLINE I magnitude(F x) { return (I)x & 0x7fffffff; }
MT_HELPER int32_t top_of(I v) {
#ifdef MT_AVX512
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t x[16], m;
  __builtin_memcpy(x, &v, sizeof x);
  m = x[0];
  MT_UNROLL(1)
  for (int i = 1; i < 16; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}
MT_INLINE float as_float(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

MT_HELPER I widen(const uint8_t* p) {
#ifdef MT_AVX512
  return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  Bytes b;
  __builtin_memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, I);
#endif
}

MT_HELPER void narrow(uint8_t* p, I v) {
#ifdef MT_AVX512
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  Bytes b = __builtin_convertvector(v, Bytes);
  __builtin_memcpy(p, &b, sizeof b);
#endif
}

MT_HELPER F root(F x) {
#ifdef MT_AVX512
  return (F)_mm512_sqrt_ps((__m512)x);
#else
  float y[16];
  store(y, x);
  for (int i = 0; i < 16; ++i) y[i] = __builtin_sqrtf(y[i]);
  return load(y);
#endif
}

// A codebook of 16 values and the 15 bounds between them (times the scale, where one scale
// serves a block).
struct Codebook {
  F values, t;
#ifdef MT_AVX512
  F t7, t3, t1;
#endif
};

MT_INLINE Codebook with_bounds(F values, F t) {
#ifdef MT_AVX512
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  auto shifted = [&](int by) __attribute__((always_inline)) {
    return (F)_mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(by)), (__m512)t);
  };
  return {values, t, splat(t[7]), shifted(3), shifted(1)};
#else
  return {values, t};
#endif
}

// A scale of Inf makes every bound NaN, as a NaN does: the codes are 0.
MT_INLINE Codebook scaled(const float* table, float scale) {
  return with_bounds(load(table), load(table + 16) * (scale + (scale - scale)));
}

// Only the low 4 bits of an index count.
MT_HELPER F decode(F values, I index) {
#ifdef MT_AVX512
  return (F)_mm512_permutexvar_ps((__m512i)index, (__m512)values);
#else
  float book[16], y[16];
  int32_t at[16];
  store(book, values);
  __builtin_memcpy(at, &index, sizeof at);
  MT_UNROLL(1)
  for (int i = 0; i < 16; ++i) y[i] = book[at[i] & 15];
  return load(y);
#endif
}

// The number of bounds below x; NaN gives 0. The bounds ascend, so halving finds it in 4 steps.
MT_HELPER I encode(const Codebook& book, F x) {
#ifdef MT_AVX512
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
#else
  float t[16];
  store(t, book.t);
  I c = {};
  MT_UNROLL(1)
  for (int k = 0; k < 15; ++k) c -= x > splat(t[k]);
  return c;
#endif
}

// The row and column vectors of the 128 elements from `from` on (0 past the end).
MT_INLINE void gather(const float* row, const float* col, int64_t from, int64_t rows, int64_t cols,
                      float* r, float* c) {
  const int64_t n = std::min<int64_t>(128, rows * cols - from);
  int64_t i = from / cols, j = from % cols;
  for (int64_t k = 0; k < n; ++i, j = 0) {
    const int64_t run = std::min(cols - j, n - k);
    for (int64_t l = 0; l < run; ++l) r[k + l] = row[i];
    for (int64_t l = 0; l < run; ++l) c[k + l] = col[j + l];
    k += run;
  }
  for (int64_t k = n; k < 128; ++k) r[k] = c[k] = 0.0f;
}

#ifdef MT_AVX512
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
#endif

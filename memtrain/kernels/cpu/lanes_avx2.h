// What sixteen lanes are in AVX2: two registers. GCC would keep a vector of 64 bytes in memory, so
// F and I are pairs, with the operators that the loops use. Included by lanes.h.

typedef float HalfF __attribute__((vector_size(32)));
typedef int32_t HalfI __attribute__((vector_size(32)));

struct I;
struct F {
  HalfF low, high;
  MT_MEMBER explicit operator I() const;
  MT_MEMBER float operator[](int l) const { return l < 8 ? low[l] : high[l - 8]; }
};
struct I {
  HalfI low, high;
  MT_MEMBER explicit operator F() const { return {(HalfF)low, (HalfF)high}; }
};
MT_MEMBER F::operator I() const { return {(HalfI)low, (HalfI)high}; }

#define MT_UNROLL(n) _Pragma("GCC unroll 1")
#define MT_HELPER MT_INLINE

// Half by half: GCC copies a pair 16 bytes at a time, and what is then read 32 at a time must wait.
MT_INLINE F load(const float* p) { return {(HalfF)_mm256_loadu_ps(p), (HalfF)_mm256_loadu_ps(p + 8)}; }
MT_INLINE void store(float* p, F v) {
  _mm256_storeu_ps(p, (__m256)v.low);
  _mm256_storeu_ps(p + 8, (__m256)v.high);
}
MT_INLINE F splat(float x) { return {(HalfF)_mm256_set1_ps(x), (HalfF)_mm256_set1_ps(x)}; }

#define MT_OPERATOR(op, Result, Left, Right) \
  MT_INLINE Result operator op(Left a, Right b) { return {a.low op b.low, a.high op b.high}; }
#define MT_WITH_NUMBER(op) \
  MT_INLINE I operator op(I a, int32_t b) { return {a.low op b, a.high op b}; }
MT_OPERATOR(+, F, F, F)
MT_OPERATOR(-, F, F, F)
MT_OPERATOR(*, F, F, F)
MT_OPERATOR(/, F, F, F)
MT_OPERATOR(>, I, F, F)
MT_OPERATOR(<, I, F, F)
MT_OPERATOR(+, I, I, I)
MT_OPERATOR(-, I, I, I)
MT_OPERATOR(*, I, I, I)
MT_OPERATOR(&, I, I, I)
MT_OPERATOR(|, I, I, I)
MT_OPERATOR(^, I, I, I)
MT_WITH_NUMBER(+)
MT_WITH_NUMBER(-)
MT_WITH_NUMBER(&)
MT_WITH_NUMBER(<)
MT_WITH_NUMBER(<<)
MT_WITH_NUMBER(>>)
#undef MT_OPERATOR
#undef MT_WITH_NUMBER
MT_INLINE F& operator+=(F& a, F b) { return a = a + b; }

MT_INLINE HalfF choose(HalfI where, HalfF a, HalfF b) {
  return (HalfF)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)where);
}
MT_INLINE F select(I where, F a, F b) {
  return {choose(where.low, a.low, b.low), choose(where.high, a.high, b.high)};
}
MT_INLINE HalfI most(HalfI a, HalfI b) { return (HalfI)_mm256_max_epi32((__m256i)a, (__m256i)b); }
MT_INLINE HalfI least(HalfI a, HalfI b) { return (HalfI)_mm256_min_epi32((__m256i)a, (__m256i)b); }
MT_INLINE I imax(I a, I b) { return {most(a.low, b.low), most(a.high, b.high)}; }
MT_INLINE I imin(I a, I b) { return {least(a.low, b.low), least(a.high, b.high)}; }
MT_INLINE I splat_int(int32_t x) { return {(HalfI)_mm256_set1_epi32(x), (HalfI)_mm256_set1_epi32(x)}; }
// The second where one is NaN.
MT_INLINE HalfF lesser(HalfF a, HalfF b) { return (HalfF)_mm256_min_ps((__m256)a, (__m256)b); }
MT_INLINE HalfF greater(HalfF a, HalfF b) { return (HalfF)_mm256_max_ps((__m256)a, (__m256)b); }
MT_INLINE F lesser(F a, F b) { return {lesser(a.low, b.low), lesser(a.high, b.high)}; }
MT_INLINE F greater(F a, F b) { return {greater(a.low, b.low), greater(a.high, b.high)}; }
MT_INLINE I to_int(F x) {
  return {(HalfI)_mm256_cvttps_epi32((__m256)x.low), (HalfI)_mm256_cvttps_epi32((__m256)x.high)};
}
MT_INLINE F to_float(I x) {
  return {(HalfF)_mm256_cvtepi32_ps((__m256i)x.low), (HalfF)_mm256_cvtepi32_ps((__m256i)x.high)};
}
// The upper and the lower 32 bits of the products.
MT_INLINE void multiply(HalfI x, uint32_t by, HalfI& high, HalfI& low) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(by));
  const __m256i even = _mm256_mul_epu32((__m256i)x, m);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), m);
  high = (HalfI)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = (HalfI)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
MT_INLINE void multiply(I x, uint32_t by, I& high, I& low) {
  multiply(x.low, by, high.low, low.low);
  multiply(x.high, by, high.high, low.high);
}

MT_INLINE int32_t top_of(I v) {
  const __m256i eight = (__m256i)most(v.low, v.high);
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xB1)));
}

MT_INLINE I widen(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {(HalfI)_mm256_cvtepu8_epi32(bytes), (HalfI)_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
MT_INLINE I widen(const uint16_t* p) {
  const auto half = [](const uint16_t* from) __attribute__((always_inline)) {
    return (HalfI)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  };
  return {half(p), half(p + 8)};
}
// The low 16 bits of each.
MT_INLINE void narrow(uint16_t* p, I v) {
  const I low = v & 0xFFFF;
  const __m256i x = _mm256_packus_epi32((__m256i)low.low, (__m256i)low.high);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(x, 0xD8));
}

// The low byte of each.
MT_INLINE void narrow(uint8_t* p, I v) {
  const I low = v & 255;
  __m256i x = _mm256_packus_epi32((__m256i)low.low, (__m256i)low.high);
  x = _mm256_permute4x64_epi64(x, 0xD8);  // packing goes by halves of a register
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

MT_INLINE F root(F x) {
  return {(HalfF)_mm256_sqrt_ps((__m256)x.low), (HalfF)_mm256_sqrt_ps((__m256)x.high)};
}

// One of eight values; only the low 3 bits of an index count.
MT_INLINE HalfF pick(HalfF values, HalfI index) {
  return (HalfF)_mm256_permutevar8x32_ps((__m256)values, (__m256i)index);
}

// A codebook of 16 values and the 15 bounds between them (times the scale, where one scale
// serves a block). Of the bounds: number 7; 3 and 11; 1, 5, 9, 13; the even ones.
struct Codebook {
  F values;
  HalfF t7, t3, t11, t1, t0;
};

MT_INLINE Codebook with_bounds(F values, F t) {
  float x[16];
  __builtin_memcpy(x, &t, sizeof x);
  const auto all = [](float y) __attribute__((always_inline)) { return (HalfF)_mm256_set1_ps(y); };
  return {values, all(x[7]), all(x[3]), all(x[11]), HalfF{x[1], x[5], x[9], x[13], x[1], x[5], x[9], x[13]},
          HalfF{x[0], x[2], x[4], x[6], x[8], x[10], x[12], x[14]}};
}

// Only the low 4 bits of an index count.
MT_INLINE F decode(F values, I index) {
  const auto half = [&](HalfI at) __attribute__((always_inline)) {
    return choose(at << 28, pick(values.high, at), pick(values.low, at));
  };
  return {half(index.low), half(index.high)};
}

// The same of four values, twice over in each half: only the low 2 bits of an index count.
MT_INLINE F decode_two_bits(F values, I index) {
  return {pick(values.low, index.low), pick(values.low, index.high)};
}

// The number of bounds below x; NaN gives 0. The bounds ascend, so halving finds it in 4 steps.
MT_INLINE I encode(const Codebook& book, F x) {
  const auto half = [&](HalfF v) __attribute__((always_inline)) {
    const HalfI above = v > book.t7;
    HalfI at = (above & 2) - (v > choose(above, book.t11, book.t3));  // true is -1
    at = at + at - (v > pick(book.t1, at));
    return at + at - (v > pick(book.t0, at));
  };
  return {half(x.low), half(x.high)};
}

MT_INLINE F look_up(const float* table, I at) {
  const auto half = [&](HalfI k) __attribute__((always_inline)) {
    return (HalfF)_mm256_i32gather_ps(table, (__m256i)k, 4);
  };
  return {half(at.low), half(at.high)};
}

MT_INLINE I look_up(const uint8_t* table, I at) {
  const auto half = [&](HalfI k) __attribute__((always_inline)) {
    return HalfI{table[k[0]], table[k[1]], table[k[2]], table[k[3]], table[k[4]], table[k[5]], table[k[6]], table[k[7]]};
  };
  return {half(at.low), half(at.high)};
}

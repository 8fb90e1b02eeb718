// What sixteen lanes are without AVX-512: two vectors of eight, which GCC splits further where no
// register has eight. It would keep a vector of 64 bytes in memory. Included by lanes.h.

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
#if defined(MT_AVX2)
#define MT_HELPER MT_INLINE
#else  // inlined, such code would take gigabytes to compile
#define MT_HELPER static __attribute__((noinline, unused))
#endif

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


template <typename Half, typename T>
MT_INLINE Half half_at(const T* p) {
  Half v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
// Half by half: GCC copies a pair 16 bytes at a time, and what is then read 32 at a time must wait.
MT_INLINE F load(const float* p) { return {half_at<HalfF>(p), half_at<HalfF>(p + 8)}; }
MT_INLINE void store(float* p, F v) {
  __builtin_memcpy(p, &v.low, sizeof v.low);
  __builtin_memcpy(p + 8, &v.high, sizeof v.high);
}
MT_INLINE HalfF all(float x) { return x - HalfF{}; }
MT_INLINE F splat(float x) { return {all(x), all(x)}; }
MT_INLINE I splat_int(int32_t x) { return {x + HalfI{}, x + HalfI{}}; }

template <typename V>
MT_INLINE V choose(HalfI where, V a, V b) { return where ? a : b; }
MT_INLINE F select(I where, F a, F b) {
  return {choose(where.low, a.low, b.low), choose(where.high, a.high, b.high)};
}
// The second where one is NaN.
#define MT_EXTREME(name, op, V) \
  MT_INLINE V name(V a, V b) { \
    return {a.low op b.low ? a.low : b.low, a.high op b.high ? a.high : b.high}; \
  }
MT_EXTREME(imax, >, I)
MT_EXTREME(imin, <, I)
MT_EXTREME(lesser, <, F)
MT_EXTREME(greater, >, F)
#undef MT_EXTREME
MT_INLINE I to_int(F x) {
  return {__builtin_convertvector(x.low, HalfI), __builtin_convertvector(x.high, HalfI)};
}
MT_INLINE F to_float(I x) {
  return {__builtin_convertvector(x.low, HalfF), __builtin_convertvector(x.high, HalfF)};
}
// The upper and the lower 32 bits of the products.
MT_INLINE void multiply(HalfI x, uint32_t by, HalfI& high, HalfI& low) {
#if defined(MT_AVX2)
  const __m256i m = _mm256_set1_epi32(static_cast<int>(by));
  const __m256i even = _mm256_mul_epu32((__m256i)x, m);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), m);
  high = (HalfI)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = (HalfI)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#else
  for (int l = 0; l < 8; ++l) {
    const uint64_t product = uint64_t{by} * static_cast<uint32_t>(x[l]);
    high[l] = static_cast<int32_t>(product >> 32), low[l] = static_cast<int32_t>(product);
  }
#endif
}
MT_HELPER void multiply(I x, uint32_t by, I& high, I& low) {
  multiply(x.low, by, high.low, low.low);
  multiply(x.high, by, high.high, low.high);
}

MT_HELPER int32_t top_of(I v) {
  const HalfI most = v.low > v.high ? v.low : v.high;
  int32_t top = most[0];
  for (int l = 1; l < 8; ++l) top = most[l] > top ? most[l] : top;
  return top;
}

#if defined(MT_AVX2)
MT_INLINE I widen(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {(HalfI)_mm256_cvtepu8_epi32(bytes), (HalfI)_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
MT_INLINE I widen(const uint16_t* p) {
  return {(HalfI)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
          (HalfI)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// The low bits of each; packing goes by halves of a register.
MT_INLINE __m256i packed(I v) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.low, (__m256i)v.high), 0xD8);
}
MT_INLINE void narrow(uint16_t* p, I v) { _mm256_storeu_si256((__m256i*)p, packed(v & 0xFFFF)); }
MT_INLINE void narrow(uint8_t* p, I v) {
  const __m256i x = packed(v & 255);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
#else
template <typename T>
MT_HELPER I widen(const T* p) {
  I v;
  for (int l = 0; l < 8; ++l) v.low[l] = p[l], v.high[l] = p[l + 8];
  return v;
}
template <typename T>
MT_HELPER void narrow(T* p, I v) {
  for (int l = 0; l < 8; ++l) p[l] = static_cast<T>(v.low[l]), p[l + 8] = static_cast<T>(v.high[l]);
}
#endif

MT_HELPER F root(F x) {
#if defined(MT_AVX2)
  return {(HalfF)_mm256_sqrt_ps((__m256)x.low), (HalfF)_mm256_sqrt_ps((__m256)x.high)};
#else
  for (int l = 0; l < 8; ++l) x.low[l] = __builtin_sqrtf(x.low[l]), x.high[l] = __builtin_sqrtf(x.high[l]);
  return x;
#endif
}

MT_HELPER F look_up(const float* table, I at) {
#if defined(MT_AVX2)
  return {(HalfF)_mm256_i32gather_ps(table, (__m256i)at.low, 4), (HalfF)_mm256_i32gather_ps(table, (__m256i)at.high, 4)};
#else
  F y;
  for (int l = 0; l < 8; ++l) y.low[l] = table[at.low[l]], y.high[l] = table[at.high[l]];
  return y;
#endif
}
MT_HELPER I look_up(const uint8_t* table, I at) {
  const auto half = [&](HalfI k) __attribute__((always_inline)) {
    return HalfI{table[k[0]], table[k[1]], table[k[2]], table[k[3]], table[k[4]], table[k[5]], table[k[6]], table[k[7]]};
  };
  return {half(at.low), half(at.high)};
}

// One of eight values; only the low 3 bits of an index count.
MT_INLINE HalfF pick(HalfF values, HalfI index) { return __builtin_shuffle(values, index); }

// A codebook of 16 values and the 15 bounds between them (times the scale, where one scale
// serves a block). Of the bounds: number 7; 3 and 11; 1, 5, 9, 13; the even ones.
struct Codebook {
  F values;
  HalfF t7, t3, t11, t1, t0;
};

MT_INLINE Codebook with_bounds(F values, F t) {
  float x[16];
  store(x, t);
  return {values, all(x[7]), all(x[3]), all(x[11]), HalfF{x[1], x[5], x[9], x[13], x[1], x[5], x[9], x[13]},
          HalfF{x[0], x[2], x[4], x[6], x[8], x[10], x[12], x[14]}};
}

// Only the low 4 bits of an index count.
MT_HELPER F decode(F values, I index) {
#if defined(MT_AVX2)
  const auto half = [&](HalfI at) __attribute__((always_inline)) {
    const __m256 low = (__m256)pick(values.low, at), high = (__m256)pick(values.high, at);
    return (HalfF)_mm256_blendv_ps(low, high, (__m256)(at << 28));
  };
  return {half(index.low), half(index.high)};
#else
  float table[16];
  store(table, values);
  return look_up(table, index & 15);
#endif
}

// The same of four values, twice over in each half: only the low 2 bits of an index count.
MT_INLINE F decode_two_bits(F values, I index) {
  return {pick(values.low, index.low), pick(values.low, index.high)};
}

// The number of bounds below x; NaN gives 0. The bounds ascend, so halving finds it in 4 steps.
MT_HELPER I encode(const Codebook& book, F x) {
  const auto half = [&](HalfF v) __attribute__((always_inline)) {
    const HalfI above = v > book.t7;
    HalfI at = (above & 2) - (v > choose(above, book.t11, book.t3));  // true is -1
    at = at + at - (v > pick(book.t1, at));
    return at + at - (v > pick(book.t0, at));
  };
  return {half(x.low), half(x.high)};
}

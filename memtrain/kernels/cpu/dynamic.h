// 8-bit codes of the dynamic-exponent maps (DE and DE-0 of kernels/maps.py) to values and
// back, bit for bit as the tables say. Included per instruction set, so it has no include guard.
//
// Gathers from a table would take most of a step's time, so AVX-512 counts instead. A magnitude
// has a position: decade e is 2**e to 2**(e + 1), and f = position / 2**e stands for (0.9 f - 0.8)
// times a power of 10. Values lie at the whole positions and a half, the bounds between them at
// the whole ones, but for the first bound of a decade, which only a table has.

#ifdef MT_AVX512

struct Dynamic {
  F high, low;       // of decade e, at lane (e - 1) % 16: 0.05 times its power of 10, in two parts
  F first;           // its first bound
  F slope, shift;    // of its position, at lane e for signed maps, e - 1 for unsigned ones
  F edges[2];        // of each power of 2: the power of 10 in the octave above it, if any
  I decades[2];      // and how many are below
};

MT_INLINE F permute(I at, F table) {
  return (F)_mm512_permutexvar_ps((__m512i)at, (__m512)table);
}

MT_INLINE F fused(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

MT_INLINE I plus_one(I x, __mmask16 where) {
  return (I)_mm512_mask_add_epi32((__m512i)x, where, (__m512i)x, _mm512_set1_epi32(1));
}

template <bool kSigned>
inline Dynamic dynamic_of(const float* book, const uint8_t*) {
  constexpr int kZero = kSigned ? 127 : -1, kLast = kSigned ? 7 : 8;  // e of 1.0
  float high[16] = {}, low[16] = {}, first[16] = {}, slope[16] = {}, shift[16] = {}, edges[32];
  int32_t decades[32];
  const auto put = [&](int e, double x) {
    high[(e + 15) % 16] = static_cast<float>(x);
    low[(e + 15) % 16] = static_cast<float>(x - high[(e + 15) % 16]);
  };
  double unit[8] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  for (int i = 0; i < 7; ++i) {
    const int e = i + !kSigned, size = 1 << e;
    put(e, unit[i] / 20);
    slope[i] = static_cast<float>(size / (0.9 * unit[i]));
    shift[i] = static_cast<float>(size * (8.0 / 9.0) - 0.125);
  }
  for (int e = !kSigned; e <= kLast; ++e) first[(e + 15) % 16] = book[256 + kZero + (1 << e) - 1];
  // The largest value, and the unsigned smallest, lie on no decade's line: lines of their own.
  put(kLast, 1.0 / (2 + 9.0 / (1 << kLast)));
  if (!kSigned) put(0, book[0] / 11.0);
  for (int k = 0; k < 32; ++k) {
    const double octave = 1.0 / (1u << (31 - k));
    edges[k] = __builtin_inff();
    decades[k] = 0;
    for (int i = 0; i < 6; ++i) {
      if (unit[i] <= octave) ++decades[k];
      if (unit[i] > octave && unit[i] < 2 * octave) edges[k] = static_cast<float>(unit[i]);
    }
  }
  Dynamic d{load(high), load(low), load(first), load(slope), load(shift),
            {load(edges), load(edges + 16)}, {}};
  __builtin_memcpy(d.decades, decades, sizeof decades);
  return d;
}

// Each stage below takes four registers before the next begins: one after the other would wait
// for results, the chain being longer than the machine looks ahead.
#define MT_FOUR _Pragma("GCC unroll 4") for (int k = 0; k < 4; ++k)

// The magnitudes at positions on their decades' lines: exact but for one rounding at the end.
MT_INLINE void lines_at(const Dynamic& d, const F* position, F* y) {
  const __m512i one = (__m512i)splat(1.0f), fraction = _mm512_set1_epi32(0x7fffff);
  I e[4];
  F n[4];
  MT_FOUR e[k] = (I)_mm512_srli_epi32((__m512i)position[k], 23);
  MT_FOUR n[k] = (F)_mm512_ternarylogic_epi32((__m512i)position[k], fraction, one, 0xEA);
  MT_FOUR n[k] = fused(n[k], splat(18.0f), splat(-16.0f));
  MT_FOUR y[k] = n[k] * permute(e[k], d.low);
  MT_FOUR y[k] = fused(n[k], permute(e[k], d.high), y[k]);
}

// The values of 64 codes.
template <bool kSigned>
MT_INLINE void decode8(const Dynamic& d, const uint8_t* codes, F scale, float* out) {
  F x[4], position[4], y[4];
  MT_FOUR x[k] = (F)_mm512_cvtepi32_ps((__m512i)widen(codes + 16 * k));
  MT_FOUR x[k] = x[k] - (kSigned ? 127.0f : -1.0f);
  MT_FOUR position[k] = (kSigned ? (F)magnitude(x[k]) : x[k]) + 0.5f;
  lines_at(d, position, y);
  if (kSigned) MT_FOUR y[k] = (F)((I)y[k] | ((I)x[k] & INT32_MIN));
  MT_FOUR store(out + 16 * k, y[k] * scale);
}

// How many decades begin below r, at 2**-30 at least.
MT_INLINE void decades_of(const Dynamic& d, const F* r, I* decade) {
  __m512i octave[4];
  __mmask16 next[4];
  MT_FOUR octave[k] = _mm512_srli_epi32((__m512i)r[k], 23);
  MT_FOUR next[k] = _mm512_cmp_ps_mask(
      (__m512)r[k],
      _mm512_permutex2var_ps((__m512)d.edges[0], octave[k], (__m512)d.edges[1]), _CMP_GE_OQ);
  MT_FOUR decade[k] = (I)_mm512_permutex2var_epi32((__m512i)d.decades[0], octave[k],
                                                   (__m512i)d.decades[1]);
  MT_FOUR decade[k] = plus_one(decade[k], next[k]);
}

// The bounds at whole positions.
MT_INLINE void bounds_at(const Dynamic& d, const F* position, F* bound) {
  lines_at(d, position, bound);
  MT_FOUR {
    const __m512i bits = (__m512i)position[k];
    const __mmask16 starts = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7fffff));
    bound[k] = (F)_mm512_mask_permutexvar_ps((__m512)bound[k], starts, _mm512_srli_epi32(bits, 23),
                                             (__m512)d.first);
  }
}

// The 8-bit codes of 64 values: how many bounds (times the scale) are below each. A first guess of
// the position, wrong by far less than 0.1, tells which bound is in doubt; that one is computed and
// compared. Bounds lie -0.25 (1.0's) to 0.5 (DE-0's first) from whole positions: `shift` holds
// their middle.
template <bool kSigned>
MT_INLINE void encode8(const Dynamic& d, const float* x, F scale, F inverse, uint8_t* codes) {
  const F round = splat(0x1.8p23f);  // its sum with a small number is whole
  I size[4], decade[4], count[4];
  F r[4], position[4], bound[4];
  MT_FOUR size[k] = kSigned ? magnitude(load(x + 16 * k)) : (I)load(x + 16 * k);
  MT_FOUR r[k] = (F)size[k] * inverse;
  MT_FOUR r[k] = (F)_mm512_max_ps((__m512)r[k], _mm512_set1_ps(0x1p-30f));
  decades_of(d, r, decade);
  MT_FOUR r[k] = fused(r[k], permute(decade[k], d.slope), permute(decade[k], d.shift));
  MT_FOUR r[k] = r[k] + round;
  MT_FOUR position[k] = r[k] - round;
  MT_FOUR count[k] = (I)r[k] - (I)round - 1;  // all bounds before the one in doubt
  bounds_at(d, position, bound);
  MT_FOUR bound[k] = bound[k] * scale;
  MT_FOUR {
    // Below zero a bound equal to x counts too, and the codes descend.
    const __mmask16 minus = kSigned ? _mm512_movepi32_mask((__m512i)load(x + 16 * k)) : 0;
    const I mine = kSigned ? plus_one(size[k], minus) : size[k];
    const __mmask16 more = _mm512_cmpgt_epi32_mask((__m512i)mine, (__m512i)bound[k]);
    const __m512i steps = (__m512i)plus_one(count[k], more);
    I code = (I)_mm512_mask_sub_epi32(steps, minus, _mm512_setzero_si512(), steps);
    code = kSigned ? imax(code + 127, I{}) : code - 1;
    narrow(codes + 16 * k, code);
  }
}

#undef MT_FOUR

#else

constexpr int32_t kLowest = 0x3280, kBuckets = 26 * 128 + 2;  // see `buckets` in blockstep.py

struct Dynamic {
  const float* book;
  const uint8_t* buckets;
};

template <bool kSigned>
inline Dynamic dynamic_of(const float* book, const uint8_t* buckets) {
  return {book, buckets};
}

template <typename To, typename From>
MT_HELPER To take(const From* table, I at) {
  int32_t k[16];
  To y;
  __builtin_memcpy(k, &at, sizeof k);
  MT_UNROLL(1)
  for (int i = 0; i < 16; ++i) y[i] = table[k[i]];
  return y;
}

template <bool kSigned>
MT_HELPER void decode8(const Dynamic& d, const uint8_t* codes, F scale, float* out) {
  for (int i = 0; i < 64; i += 16) store(out + i, take<F>(d.book, widen(codes + i)) * scale);
}

// One bound in doubt, found by x's leading bits.
template <bool kSigned>
MT_HELPER void encode8(const Dynamic& d, const float* from, F scale, F inverse, uint8_t* codes) {
  for (int i = 0; i < 64; i += 16) {
    const F x = load(from + i);
    const I bits = (I)(x * inverse), limit = I{} + (kBuckets - 1);
    const I bucket = imin(imax(((bits & 0x7fffffff) >> 16) - kLowest, I{}), limit);
    const I base = take<I>(d.buckets, bucket + (bits < 0 ? I{} + kBuckets : I{}));
    narrow(codes + i, base - (x > take<F>(d.book + 256, base) * scale));  // true is -1
  }
}

#endif

// 8-bit codes of the dynamic-exponent maps (DE and DE-0 of kernels/codebook/values.py) to values and
// back, bit for bit as the tables say. Included per instruction set, so it has no include guard.
//
// Gathers from a table would take most of a step's time, so AVX-512 counts instead. A magnitude
// has a position: decade e is 2**e to 2**(e + 1), and f = position / 2**e stands for (0.9 f - 0.8)
// times a power of 10. Values lie at the whole positions and a half, the bounds between them at
// the whole ones, but for the first bound of a decade, which only a table has.

#ifdef MT_AVX512

// Tables of 32 are for octaves: from 2**-30 (at 1) to 1.0 (at 31).
struct Dynamic {
  F high, low;  // of decade e, at lane (e - 1) % 16: 0.05 times its power of 10, in two parts
  F edge[2];    // the first bound of a decade that lies in an octave, or Inf
  F slope[2], shift[2], last[2];  // of the decade where an octave begins: to positions, at most
  const float* bounds;            // from the one at position 1 on
};

constexpr float kBase = 512.0f;  // added to positions: the sum has 14 bits after the point
constexpr float kLeast = 0x1p-30f;  // added to magnitudes: no octave is below the tables'
constexpr float kDoubt = 0x1p-12f;  // added to positions: what is near a whole one is just above it
constexpr int32_t kBaseCount = 0x44000000 >> 14;

MT_INLINE F permute(I at, F table) {
  return (F)_mm512_permutexvar_ps((__m512i)at, (__m512)table);
}

template <bool kSigned>
inline Dynamic dynamic_of(const float* book, const uint8_t*) {
  constexpr int kFirst = !kSigned, kLast = kFirst + 7;  // e of 1e-7 to 1e-6, and of 1.0 alone
  float high[16] = {}, low[16] = {}, edge[32], slope[32], shift[32], last[32];
  const auto put = [&](int e, double x) {
    high[(e + 15) % 16] = static_cast<float>(x);
    low[(e + 15) % 16] = static_cast<float>(x - high[(e + 15) % 16]);
  };
  const double unit[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  for (int i = 0; i < 7; ++i) put(i + kFirst, unit[i] / 20);
  // The largest value, and the unsigned smallest, lie on no decade's line: lines of their own.
  put(kLast, 1.0 / (2 + 9.0 / (1 << kLast)));
  if (!kSigned) put(0, book[0] / 11.0);
  Dynamic d{};
  d.bounds = book + 256 + (kSigned ? 127 : -1);
  int e = kFirst;  // the next decade to begin
  for (int k = 0; k < 32; ++k) {
    const double octave = 1.0 / (1u << (31 - k)), whole = 1 << e, half = 1 << e >> 1;
    edge[k] = __builtin_inff();
    slope[k] = e > kFirst && e <= kLast ? static_cast<float>(half / (0.9 * unit[e - 1 - kFirst])) : 0.0f;
    const double line = slope[k] != 0.0f ? half * (8.0 / 9.0) : e > kLast ? half + 0.5 : kFirst + 0.5;
    shift[k] = static_cast<float>(kBase + kDoubt + line - double{slope[k]} * kLeast);
    last[k] = kBase + static_cast<float>(e > kLast ? half + 0.5 : whole - 0.5);
    if (e <= kLast && d.bounds[(1 << e) - 1] + kLeast < 2 * octave) edge[k] = d.bounds[(1 << e++) - 1];
  }
  d.high = load(high), d.low = load(low);
  for (int i = 0; i < 2; ++i) {
    d.edge[i] = load(edge + 16 * i), d.slope[i] = load(slope + 16 * i);
    d.shift[i] = load(shift + 16 * i), d.last[i] = load(last + 16 * i);
  }
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
  if (kSigned) MT_FOUR x[k] = x[k] - 127.0f;
  MT_FOUR position[k] = kSigned ? (F)magnitude(x[k]) + 0.5f : x[k] + 1.5f;
  lines_at(d, position, y);
  if (kSigned) MT_FOUR y[k] = (F)((I)y[k] | ((I)x[k] & INT32_MIN));
  MT_FOUR store(out + 16 * k, y[k] * scale);
}

MT_INLINE F choose(const F* table, I at) {
  return (F)_mm512_permutex2var_ps((__m512)table[0], (__m512i)at, (__m512)table[1]);
}

// The counts in doubt of 64 values: their bound is computed and compared.
static __attribute__((noinline, unused)) void count_in_doubt(const Dynamic& d, uint64_t doubt, const float* position,
                                             const int32_t* size, float scale, int32_t* count) {
  for (; doubt; doubt &= doubt - 1) {
    const int i = __builtin_ctzll(doubt);
    const int32_t near = static_cast<int32_t>(position[i] + 0.5f - kBase);
    const float bound = d.bounds[near - 1] * scale;
    int32_t bits;
    __builtin_memcpy(&bits, &bound, 4);
    count[i] = kBaseCount + near - (size[i] <= bits);
  }
}

// The 8-bit codes of 64 values, negated first if `sign` is set: how many bounds (times the scale)
// are below each. The position, with an error below 2**-12.5, decides unless it is nearly whole.
template <bool kSigned>
MT_INLINE void encode8(const Dynamic& d, const float* x, I sign, F scale, F inverse, uint8_t* codes) {
  const F edge[2] = {d.edge[0] * scale, d.edge[1] * scale};
  I size[4], count[4], at[4];
  F r[4];
  __mmask16 minus[4] = {}, near[4];
  MT_FOUR size[k] = kSigned ? magnitude(load(x + 16 * k)) : (I)load(x + 16 * k);
  MT_FOUR r[k] = fused((F)size[k], inverse, splat(kLeast));
  MT_FOUR at[k] = (I)_mm512_srli_epi32((__m512i)r[k], 23);
  if (kSigned) {  // below zero a bound equal to x counts too, and the codes descend
    MT_FOUR minus[k] = _mm512_movepi32_mask((__m512i)flipped(load(x + 16 * k), sign));
    MT_FOUR size[k] = plus_one(size[k], minus[k]);
  }
  MT_FOUR at[k] = plus_one(at[k], _mm512_cmpgt_epi32_mask((__m512i)size[k], (__m512i)choose(edge, at[k])));
  MT_FOUR r[k] = fused(r[k], choose(d.slope, at[k]), choose(d.shift, at[k]));
  MT_FOUR r[k] = (F)_mm512_min_ps((__m512)r[k], (__m512)choose(d.last, at[k]));
  MT_FOUR near[k] = _mm512_testn_epi32_mask((__m512i)r[k], _mm512_set1_epi32(0x3ff8));
  MT_FOUR count[k] = (I)_mm512_srli_epi32((__m512i)r[k], 14);
  if (__builtin_expect(!_kortestz_mask16_u8(_kor_mask16(near[0], near[1]), _kor_mask16(near[2], near[3])), 0)) {
    const uint64_t doubt = near[0] | static_cast<uint64_t>(near[1]) << 16 | static_cast<uint64_t>(near[2]) << 32 | static_cast<uint64_t>(near[3]) << 48;
    float position[64];
    int32_t sizes[64], counts[64];
    MT_FOUR store(position + 16 * k, r[k]), store((float*)sizes + 16 * k, (F)size[k]), store((float*)counts + 16 * k, (F)count[k]);
    count_in_doubt(d, doubt, position, sizes, ((const float*)&scale)[0], counts);
    MT_FOUR count[k] = (I)load((const float*)counts + 16 * k);
  }
  I code[4];
  MT_FOUR code[k] = count[k] + ((kSigned ? 127 : -1) - kBaseCount);
  if (kSigned) MT_FOUR code[k] = (I)_mm512_mask_sub_epi32((__m512i)code[k], minus[k], _mm512_set1_epi32(127 + kBaseCount), (__m512i)count[k]);
  const __m512i halves[2] = {pack_two(code), pack_two(code + 2)};
  _mm512_storeu_si512(codes, straight(pack_four(halves)));
}

#undef MT_FOUR

#else

struct Dynamic {
  const float* book;
  const uint8_t* buckets;
};

template <bool kSigned>
inline Dynamic dynamic_of(const float* book, const uint8_t* buckets) {
  return {book, buckets + 0x8000};  // by signed upper halves: see `upper_buckets` in codecs.py
}

template <bool kSigned>
MT_HELPER void decode8(const Dynamic& d, const uint8_t* codes, F scale, float* out) {
  for (int i = 0; i < 64; i += 16) store(out + i, look_up(d.book, widen(codes + i)) * scale);
}

// One bound in doubt, found by x's leading bits.
template <bool kSigned>
MT_HELPER void encode8(const Dynamic& d, const float* from, I sign, F scale, F inverse, uint8_t* codes) {
  for (int i = 0; i < 64; i += 16) {
    const F x = flipped(load(from + i), sign);
    const I base = look_up(d.buckets, (I)(x * inverse) >> 16);
    narrow(codes + i, base - (x > look_up(d.book + 256, base) * scale));  // true is -1
  }
}

#endif

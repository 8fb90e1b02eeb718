// 4-bit codes of 128 values that wait in a buffer. Included per instruction set, so it has no
// include guard. A search in the bounds serves every map; the usual two have shortcuts in AVX-512,
// where the first guess is one off at most and one compare with the very bound corrects it.

// The codes of 128 values, elements j and j + 64 to a byte.
MT_INLINE void search(const Codebook& book, const float* x, uint8_t* codes) {
  MT_UNROLL(4)
  for (int i = 0; i < 64; i += 16)
    narrow(codes + i, encode(book, load(x + i)) | encode(book, load(x + 64 + i)) << 4);
}

// `search` with a scale that may be negative.
MT_INLINE void search_signed(const float* table, float scale, const float* x, uint8_t* codes) {
  const Codebook book = scaled(table, __builtin_fabsf(scale));
  const I sign = sign_bits(scale);
  MT_UNROLL(4)
  for (int i = 0; i < 64; i += 16)
    narrow(codes + i, encode(book, flipped(load(x + i), sign)) | encode(book, flipped(load(x + 64 + i), sign)) << 4);
}

// A block on its way to codes that `drawn` rounds.
struct DrawnCoder {
  DrawnMap map;
  I sign, codes[8];
};

MT_INLINE void start(DrawnCoder& c, const float* table, float scale) {
  c.sign = sign_bits(scale), c.map = drawn_map(table, __builtin_fabsf(scale));
}

MT_INLINE void take(DrawnCoder& c, const float* x, const float* u, int pair) {
  MT_UNROLL(2)
  for (int k = 2 * pair; k < 2 * pair + 2; ++k)
    c.codes[k] = encode_drawn(c.map, flipped(load(x + 16 * k), c.sign), load(u + 16 * k));
}

MT_INLINE void finish(const DrawnCoder& c, uint8_t* codes) {
  MT_UNROLL(4)
  for (int k = 0; k < 4; ++k) narrow(codes + 16 * k, c.codes[k] | c.codes[k + 4] << 4);
}

// The second moment's map; its values come times `unit` where no block has a scale of its own.
struct UnsignedMap {
  const float* table;
  bool even;
  float unit;
  Codebook book;
};

#ifdef MT_AVX512

// DE, signed: magnitudes a times the scale go to buckets by the leading bits of 0.875 + 17.5 a
// (times 2**-80, which makes these a small number), half an octave each; none has two bounds.
struct SignedMap {
  const float* table;
  bool usual;
  F bounds;       // the magnitude of a bucket's bound
  __m512i codes;  // of what is below it
};

inline SignedMap signed_map(const float* table) {
  constexpr int kBound[16] = {3, 3, 4, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7, 0, 1, 2};
  const float* bounds = table + 16 + 7;
  float held[16];
  uint8_t codes[64];
  for (int k = 0; k < 64; ++k) codes[k] = static_cast<uint8_t>(7 + kBound[k % 16]);
  for (int k = 0; k < 16; ++k) held[k] = bounds[kBound[k]];
  bool usual = true;
  for (int k = 0; k < 8; ++k) {
    usual &= k == 7 || bounds[k] == -bounds[-1 - k];
    for (const float near : {0.999f, 1.001f}) {
      const float u = 0.875f + 17.5f * near * bounds[k];
      int32_t bits;
      __builtin_memcpy(&bits, &u, 4);
      usual &= u > 0.75f && u < 24.0f && kBound[bits >> 22 & 15] == k;
    }
  }
  return {table, usual, load(held), _mm512_loadu_si512(codes)};
}

// A block on its way to codes: its registers two by two, then the bytes. 16-bit lanes hold what
// two registers give, as pack_two orders it.
struct SignedCoder {
  F bounds, slope, shift;
  I sign;
  __m512i at[4];
  uint16_t minus[8], above[8];
};

MT_INLINE void start(SignedCoder& c, const SignedMap& map, float scale) {
  c.sign = sign_bits(scale), scale = __builtin_fabsf(scale);
  c.bounds = map.bounds * scale, c.slope = splat(0x1.18p-76f / scale), c.shift = splat(0x1.cp-81f);
}

MT_INLINE void take(SignedCoder& c, const float* x, int pair) {
  I at[2];
  MT_UNROLL(2)
  for (int i = 0; i < 2; ++i) {
    const int k = 2 * pair + i;
    const F value = flipped(load(x + 16 * k), c.sign);
    const __mmask16 negative = _mm512_movepi32_mask((__m512i)value);
    I size = magnitude(value);
    at[i] = (I)_mm512_srli_epi32((__m512i)fused((F)size, c.slope, c.shift), 22);
    size = plus_one(size, negative);  // below zero a bound equal to x counts too
    const __m512i bound = (__m512i)_mm512_permutexvar_ps((__m512i)at[i], (__m512)c.bounds);
    _store_mask16(c.above + k, _mm512_cmpgt_epi32_mask((__m512i)size, bound));
    _store_mask16(c.minus + k, negative);
  }
  c.at[pair] = pack_two(at);
}

MT_INLINE void finish(SignedCoder& c, const SignedMap& map, const float* x, float scale, uint8_t* codes) {
  const float size = __builtin_fabsf(scale);
  if (__builtin_expect(!map.usual || !(size >= 0x1p-90f && size <= 0x1p40f), 0))
    return search_signed(map.table, scale, x, codes);
  __m512i half[2];
  for (int h = 0; h < 2; ++h) {
    __mmask64 one, down;
    __builtin_memcpy(&one, c.above + 4 * h, 8);
    __builtin_memcpy(&down, c.minus + 4 * h, 8);
    half[h] = _mm512_shuffle_epi8(map.codes, straight(pack_four(c.at + 2 * h)));
    half[h] = _mm512_mask_add_epi8(half[h], one, half[h], _mm512_set1_epi8(1));
    half[h] = _mm512_mask_subs_epu8(half[h], down, _mm512_set1_epi8(14), half[h]);
  }
  _mm512_storeu_si512(codes, _mm512_or_si512(half[0], _mm512_slli_epi16(half[1], 4)));
}

// The unsigned map Linear: its code of a value relative to its scale is found by rounding.
struct UnsignedCoder {
  F bounds, slope;
  __m512i code[4];
};

constexpr float kUnit = 32.0f;

MT_INLINE void start(UnsignedCoder& c, const UnsignedMap& map, float scale) {
  c.bounds = load(map.table + 16) * scale, c.slope = splat(15.5f / scale);
}

// 15.5 a - 1.25 is less than 0.3 from the bound's number at each bound.
MT_INLINE void take_scaled(UnsignedCoder& c, const float* x, int pair) {
  I code[2];
  MT_UNROLL(2)
  for (int i = 0; i < 2; ++i) {
    const F value = load(x + 32 * pair + 16 * i);
    const __m512i at = _mm512_cvtps_epi32((__m512)fused(value, c.slope, splat(-1.25f)));
    const __m512 bound = _mm512_permutexvar_ps(at, (__m512)c.bounds);
    code[i] = plus_one((I)at, _mm512_cmp_ps_mask((__m512)value, bound, _CMP_GT_OQ));
  }
  c.code[pair] = pack_two(code);
}

// Values up to 32 (and a bit), whose bounds are the odd numbers from 3 on; NaN is 0.
MT_INLINE void take_unit(UnsignedCoder& c, const float* x, int pair) {
  constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
  I up[2];
  MT_UNROLL(2)
  for (int i = 0; i < 2; ++i)
    up[i] = (I)_mm512_cvt_roundps_epi32((__m512)load(x + 32 * pair + 16 * i), kUp);
  c.code[pair] = pack_two(up);
}

MT_INLINE void finish_scaled(UnsignedCoder& c, const UnsignedMap& map, const float* x, float scale,
                             uint8_t* codes) {
  if (__builtin_expect(!map.even || !(scale >= 0x1p-90f && scale <= 0x1p90f), 0))
    return search(scaled(map.table, scale), x, codes);
  const __m512i high = _mm512_slli_epi16(pack_four(c.code + 2), 4);
  _mm512_storeu_si512(codes, straight(_mm512_or_si512(pack_four(c.code), high)));
}

MT_INLINE void finish_unit(UnsignedCoder& c, const UnsignedMap& map, const float* x, uint8_t* codes) {
  if (__builtin_expect(map.unit != kUnit, 0)) return search(map.book, x, codes);
  const __m512i two = _mm512_set1_epi8(2), low = _mm512_set1_epi8(15);
  const __m512i first = _mm512_srli_epi16(_mm512_subs_epu8(pack_four(c.code), two), 1);
  const __m512i other = _mm512_slli_epi16(_mm512_subs_epu8(pack_four(c.code + 2), two), 3);
  _mm512_storeu_si512(codes, straight(_mm512_ternarylogic_epi32(low, first, other, 0xCA)));
}

// Whether the bounds are those of the unsigned Linear map.
inline bool is_even(const float* table) {
  bool even = true;
  for (int k = 0; k < 15; ++k) even &= table[16 + k] == (static_cast<float>(k) + 1.5f) / 16;
  return even;
}

// 1 where a reciprocal times kUnit might be Inf, or the map has no shortcut.
inline float unit_of(const float* table, const float* maxima, int64_t n, float unit) {
  if (!is_even(table)) return 1.0f;
  for (int64_t i = 0; i < n; ++i)
    if (maxima[i] > 0.0f && maxima[i] < 0x1p-120f) unit = 1.0f;
  return unit;
}

inline UnsignedMap unsigned_map(const float* table, float unit) {
  return {table, is_even(table), unit, scaled(table, 1.0f)};
}

#else

struct SignedMap {
  const float* table;
};

struct SignedCoder {};
struct UnsignedCoder {};

constexpr float kUnit = 1.0f;

inline SignedMap signed_map(const float* table) { return {table}; }
inline UnsignedMap unsigned_map(const float* table, float unit) {
  return {table, false, unit, scaled(table, 1.0f)};
}
inline float unit_of(const float*, const float*, int64_t, float unit) { return unit; }

MT_INLINE void start(SignedCoder&, const SignedMap&, float) {}
MT_INLINE void start(UnsignedCoder&, const UnsignedMap&, float) {}
MT_INLINE void take(SignedCoder&, const float*, int) {}
MT_INLINE void take_scaled(UnsignedCoder&, const float*, int) {}
MT_INLINE void take_unit(UnsignedCoder&, const float*, int) {}

MT_INLINE void finish(SignedCoder&, const SignedMap& map, const float* x, float scale, uint8_t* codes) {
  search_signed(map.table, scale, x, codes);
}

MT_INLINE void finish_scaled(UnsignedCoder&, const UnsignedMap& map, const float* x, float scale,
                             uint8_t* codes) {
  search(scaled(map.table, scale), x, codes);
}

MT_INLINE void finish_unit(UnsignedCoder&, const UnsignedMap& map, const float* x, uint8_t* codes) {
  search(map.book, x, codes);
}

#endif

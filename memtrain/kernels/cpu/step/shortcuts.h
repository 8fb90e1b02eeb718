// 4-bit codes of the usual two maps in AVX-512: a first guess is one off at most, and one compare
// with the very bound corrects it. Included per instruction set, so it has no include guard.

#ifdef MT_AVX512

// DE, signed: magnitudes a times the scale go to buckets by the leading bits of 0.875 + 17.5 a
// (times 2**-80, which makes these a small number), half an octave each; none has two bounds.
template <bool kSigned>
struct Shortcut {
  bool usual = true;
  F bounds;       // the magnitude of a bucket's bound
  __m512i codes;  // of what is below it

  MT_MEMBER explicit Shortcut(const float* table) {
    constexpr int kBound[16] = {3, 3, 4, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7, 0, 1, 2};
    const float* from = table + 16 + 7;
    float held[16];
    uint8_t below[64];
    for (int k = 0; k < 64; ++k) below[k] = static_cast<uint8_t>(7 + kBound[k % 16]);
    for (int k = 0; k < 16; ++k) held[k] = from[kBound[k]];
    for (int k = 0; k < 8; ++k) {
      usual &= k == 7 || from[k] == -from[-1 - k];
      for (const float near : {0.999f, 1.001f}) {
        const float u = 0.875f + 17.5f * near * from[k];
        int32_t bits;
        __builtin_memcpy(&bits, &u, 4);
        usual &= u > 0.75f && u < 24.0f && kBound[bits >> 22 & 15] == k;
      }
    }
    bounds = load(held), codes = _mm512_loadu_si512(below);
  }

  MT_MEMBER bool write(const float* x, float scale, uint8_t* to) const {
    const float size = __builtin_fabsf(scale);
    if (!(usual && size >= 0x1p-90f && size <= 0x1p40f)) return false;
    const F each = bounds * size, slope = splat(0x1.18p-76f / size), shift = splat(0x1.cp-81f);
    const I sign = sign_bits(scale);
    __m512i at[4], half[2];
    uint16_t minus[8], above[8];
    MT_UNROLL(4)
    for (int pair = 0; pair < 4; ++pair) {
      I found[2];
      MT_UNROLL(2)
      for (int i = 0; i < 2; ++i) {
        const int k = 2 * pair + i;
        const F value = flipped(load(x + 16 * k), sign);
        const __mmask16 negative = _mm512_movepi32_mask((__m512i)value);
        I magnitudes = magnitude(value);
        found[i] = (I)_mm512_srli_epi32((__m512i)fused((F)magnitudes, slope, shift), 22);
        magnitudes = plus_one(magnitudes, negative);  // below zero a bound equal to x counts too
        const __m512i bound = (__m512i)_mm512_permutexvar_ps((__m512i)found[i], (__m512)each);
        above[k] = _mm512_cmpgt_epi32_mask((__m512i)magnitudes, bound), minus[k] = negative;
      }
      at[pair] = pack_two(found);
    }
    for (int h = 0; h < 2; ++h) {
      __mmask64 one, down;
      __builtin_memcpy(&one, above + 4 * h, 8);
      __builtin_memcpy(&down, minus + 4 * h, 8);
      half[h] = _mm512_shuffle_epi8(codes, straight(pack_four(at + 2 * h)));
      half[h] = _mm512_mask_add_epi8(half[h], one, half[h], _mm512_set1_epi8(1));
      half[h] = _mm512_mask_subs_epu8(half[h], down, _mm512_set1_epi8(14), half[h]);
    }
    _mm512_storeu_si512(to, _mm512_or_si512(half[0], _mm512_slli_epi16(half[1], 4)));
    return true;
  }
};

// Linear, unsigned: by rounding. 15.5 a - 1.25 is less than 0.3 from a bound's number at the bound.
template <>
struct Shortcut<false> {
  bool usual = true;
  F bounds;

  MT_MEMBER explicit Shortcut(const float* table) : bounds(load(table + 16)) {
    for (int k = 0; k < 15; ++k) usual &= bounds[k] == (static_cast<float>(k) + 1.5f) / 16;
  }

  MT_MEMBER bool write(const float* x, float scale, uint8_t* to) const {
    if (!(usual && scale >= 0x1p-90f && scale <= 0x1p90f)) return false;
    const F each = bounds * scale, slope = splat(15.5f / scale);
    __m512i found[4];
    MT_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      I code[2];
      MT_UNROLL(2)
      for (int i = 0; i < 2; ++i) {
        const F value = load(x + 32 * k + 16 * i);
        const __m512i at = _mm512_cvtps_epi32((__m512)fused(value, slope, splat(-1.25f)));
        const __m512 bound = _mm512_permutexvar_ps(at, (__m512)each);
        code[i] = plus_one((I)at, _mm512_cmp_ps_mask((__m512)value, bound, _CMP_GT_OQ));
      }
      found[k] = pack_two(code);
    }
    const __m512i high = _mm512_slli_epi16(pack_four(found + 2), 4);
    _mm512_storeu_si512(to, straight(_mm512_or_si512(pack_four(found), high)));
    return true;
  }
};

#else

template <bool kSigned>
struct Shortcut {
  MT_MEMBER explicit Shortcut(const float*) {}
  MT_MEMBER bool write(const float*, float, uint8_t*) const { return false; }
};

#endif

// Rounding to float formats with AVX-512, sixteen numbers at a time: the common formats and nearest
// rounding only. Results as in rounding.cpp, which asks `floats_fit` first.
#include "floats/rounding_avx512.h"

#ifdef MT_X86
#include <cstring>
#include "avx512_begin.h"

namespace memtrain {
namespace {

constexpr int kFar = 100;  // of the least number's exponent: its reciprocal is a float32
enum Kind : int { kWhole, kBrain, kHalf, kByte, kWord };

// The bits of 16 float32 numbers, those past the end 0.
template <int kKind>
MT_INLINE __m512i load(const void* x, int64_t at, __mmask16 inside) {
  if constexpr (kKind == kWhole)
    return _mm512_maskz_loadu_epi32(inside, static_cast<const int32_t*>(x) + at);
  const __m256i two = _mm256_maskz_loadu_epi16(inside, static_cast<const int16_t*>(x) + at);
  if constexpr (kKind == kBrain) return _mm512_slli_epi32(_mm512_cvtepu16_epi32(two), 16);
  return _mm512_castps_si512(_mm512_cvtph_ps(two));
}

// Of numbers that the type holds, or to the nearest with ties to even.
template <int kKind>
MT_INLINE void store(void* out, int64_t at, __mmask16 inside, __m512i bits) {
  if constexpr (kKind == kWhole) {
    _mm512_mask_storeu_epi32(static_cast<int32_t*>(out) + at, inside, bits);
  } else if constexpr (kKind == kBrain) {
    const __m512 x = _mm512_castsi512_ps(bits);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    sum = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7FC0));
    _mm512_mask_cvtepi32_storeu_epi16(static_cast<int16_t*>(out) + at, inside, sum);
  } else {
    const __m256i half = _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT);
    _mm256_mask_storeu_epi16(static_cast<int16_t*>(out) + at, inside, half);
  }
}

struct Wide {
  __m512i drop, half, least, offset, limit, over, nan, mark;
  __m512 up, down;
  __m128i shift;
  bool signless;  // zero has no sign

  Wide(const FloatForm& f, bool encode)
      : drop(_mm512_set1_epi32((1 << (23 - f.mantissa)) - 1)),
        half(_mm512_set1_epi32(1 << (22 - f.mantissa))),
        least(_mm512_set1_epi32((f.least + 127) << 23)),
        offset(_mm512_set1_epi32((f.least + 126) << f.mantissa)),
        limit(_mm512_set1_epi32(f.limit)),
        over(_mm512_set1_epi32(encode ? f.over_code : f.over_bits)),
        nan(_mm512_set1_epi32(encode ? f.nan : 0x7FC00000)),
        mark(_mm512_set1_epi32(f.mark)),
        up(power(f.mantissa - f.least)),
        down(power(f.least - f.mantissa)),
        shift(_mm_cvtsi32_si128(23 - f.mantissa)),
        signless(f.nan == f.mark) {}

  static __m512 power(int exponent) {
    return _mm512_castsi512_ps(_mm512_set1_epi32((exponent + 127) << 23));
  }
};

template <int kIn, int kOut, bool kEven>
MT_INLINE int64_t sixteen(const void* x, void* out, int64_t at, __mmask16 inside, const Wide& w) {
  constexpr bool kEncode = kOut == kByte || kOut == kWord;
  const __m512i bits = load<kIn>(x, at, inside), one = _mm512_set1_epi32(1);
  const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(0x7F800000));
  const __mmask16 small = _mm512_cmplt_epi32_mask(size, w.least);
  // Normal numbers: the mantissa's end falls off.
  __m512i part = w.half;
  if constexpr (kEven) {
    const __m512i odd = _mm512_and_si512(_mm512_srl_epi32(size, w.shift), one);
    part = _mm512_add_epi32(_mm512_sub_epi32(part, one), odd);
  }
  const __m512i cut = _mm512_andnot_si512(w.drop, _mm512_add_epi32(size, part));
  // Below the least normal number: whole multiples of the least number.
  const __m512 times = _mm512_mul_ps(_mm512_castsi512_ps(size), w.up);
  __m512i whole;
  if constexpr (kEven) {
    whole = _mm512_cvt_roundps_epi32(times, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    constexpr int kDown = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    whole = _mm512_cvttps_epi32(_mm512_add_round_ps(times, _mm512_set1_ps(0.5f), kDown));
  }
  const __m512i normal = _mm512_sub_epi32(_mm512_srl_epi32(cut, w.shift), w.offset);
  const __m512i code = _mm512_mask_mov_epi32(normal, small, whole);
  const __mmask16 past = _mm512_cmpgt_epi32_mask(code, w.limit) & static_cast<__mmask16>(~nan);
  const __mmask16 minus = _mm512_movepi32_mask(bits);
  __m512i y;
  if constexpr (kEncode) {
    y = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(code, past, w.over), nan, w.nan);
    const __mmask16 keeps = w.signless ? _mm512_test_epi32_mask(y, y) : __mmask16{0xFFFF};
    y = _mm512_mask_or_epi32(y, minus & keeps & static_cast<__mmask16>(~nan), y, w.mark);
    if constexpr (kOut == kByte)
      _mm512_mask_cvtepi32_storeu_epi8(static_cast<int8_t*>(out) + at, inside, y);
    else
      _mm512_mask_cvtepi32_storeu_epi16(static_cast<int16_t*>(out) + at, inside, y);
  } else {
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), w.down);
    y = _mm512_mask_mov_epi32(cut, small, _mm512_castps_si512(value));
    y = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(y, past, w.over), nan, w.nan);
    y = _mm512_or_si512(y, _mm512_andnot_si512(_mm512_set1_epi32(0x7FFFFFFF), bits));
    store<kOut>(out, at, inside, y);
  }
  return __builtin_popcount(past & inside);
}

template <int kIn, int kOut, bool kEven>
int64_t rounded(const void* x, void* out, int64_t begin, int64_t end, const FloatForm& f) {
  const Wide w(f, kOut == kByte || kOut == kWord);
  int64_t count = 0, at = begin;
  for (; at + 16 <= end; at += 16) count += sixteen<kIn, kOut, kEven>(x, out, at, 0xFFFF, w);
  if (at < end)
    count += sixteen<kIn, kOut, kEven>(x, out, at, static_cast<__mmask16>((1 << (end - at)) - 1), w);
  return count;
}

template <int kIn, bool kEven>
int64_t rounded(const void* x, void* out, int64_t begin, int64_t end, const FloatForm& f,
                int64_t bytes) {
  if (bytes == 1) return rounded<kIn, kByte, kEven>(x, out, begin, end, f);
  if (bytes == 2) return rounded<kIn, kWord, kEven>(x, out, begin, end, f);
  return rounded<kIn, kIn, kEven>(x, out, begin, end, f);
}

template <int kIn>
int64_t rounded(const void* x, void* out, int64_t begin, int64_t end, const FloatForm& f,
                int64_t bytes, bool even) {
  return even ? rounded<kIn, true>(x, out, begin, end, f, bytes)
              : rounded<kIn, false>(x, out, begin, end, f, bytes);
}

template <int kOut>
MT_INLINE void decode_sixteen(const void* codes, int64_t bytes, void* out, int64_t at,
                              __mmask16 inside, const Wide& w, const FloatForm& f) {
  __m512i code;
  if (bytes == 1)
    code = _mm512_cvtepu8_epi32(
        _mm_maskz_loadu_epi8(inside, static_cast<const int8_t*>(codes) + at));
  else
    code = _mm512_cvtepu16_epi32(
        _mm256_maskz_loadu_epi16(inside, static_cast<const int16_t*>(codes) + at));
  const __m512i size = _mm512_and_si512(code, _mm512_set1_epi32(f.mark - 1));
  const __m512i normal = _mm512_sll_epi32(_mm512_add_epi32(size, w.offset), w.shift);
  const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(size), w.down);
  const __mmask16 small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(1 << f.mantissa));
  __mmask16 nan = _mm512_cmpgt_epi32_mask(size, w.limit);
  if (w.signless) nan |= _mm512_cmpeq_epi32_mask(code, w.mark);
  const __mmask16 infinite = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(f.infinity));
  __m512i y = _mm512_mask_mov_epi32(normal, small, _mm512_castps_si512(value));
  y = _mm512_mask_mov_epi32(y, nan, _mm512_set1_epi32(0x7FC00000));
  y = _mm512_mask_mov_epi32(y, infinite, _mm512_set1_epi32(0x7F800000));
  const __mmask16 minus = _mm512_test_epi32_mask(code, w.mark);
  y = _mm512_mask_or_epi32(y, minus, y, _mm512_set1_epi32(INT32_MIN));
  store<kOut>(out, at, inside, y);
}

template <int kOut>
void decoded(const void* codes, int64_t bytes, void* out, int64_t begin, int64_t end,
             const FloatForm& f) {
  const Wide w(f, true);
  int64_t at = begin;
  for (; at + 16 <= end; at += 16) decode_sixteen<kOut>(codes, bytes, out, at, 0xFFFF, w, f);
  if (at < end)
    decode_sixteen<kOut>(codes, bytes, out, at, static_cast<__mmask16>((1 << (end - at)) - 1), w, f);
}

}  // namespace

bool floats_fit(const FloatForm& f) {
  const int32_t least = f.least - f.mantissa;  // the least number's exponent
  return mt_isa() >= 2 && f.rounding != 2 && f.mantissa >= 1 && -kFar <= least && f.least <= kFar;
}

int64_t floats_round(const void* x, void* out, int64_t begin, int64_t end, const FloatForm& f,
                     int64_t type, int64_t bytes) {
  const bool even = f.rounding == 1;
  if (type == 0) return rounded<kWhole>(x, out, begin, end, f, bytes, even);
  if (type == 1) return rounded<kBrain>(x, out, begin, end, f, bytes, even);
  return rounded<kHalf>(x, out, begin, end, f, bytes, even);
}

void floats_decode(const void* codes, int64_t bytes, void* out, int64_t begin, int64_t end,
                   const FloatForm& f, int64_t type) {
  if (type == 0) return decoded<kWhole>(codes, bytes, out, begin, end, f);
  if (type == 1) return decoded<kBrain>(codes, bytes, out, begin, end, f);
  return decoded<kHalf>(codes, bytes, out, begin, end, f);
}

}  // namespace memtrain
#include "avx512_end.h"

#else
namespace memtrain {
bool floats_fit(const FloatForm&) { return false; }
int64_t floats_round(const void*, void*, int64_t, int64_t, const FloatForm&, int64_t, int64_t) {
  return 0;
}
void floats_decode(const void*, int64_t, void*, int64_t, int64_t, const FloatForm&, int64_t) {}
}  // namespace memtrain
#endif

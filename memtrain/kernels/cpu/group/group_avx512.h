// Group dequantisation with AVX-512: levels from a table in a register. Results as in group.cpp. Quantisation: encode_avx512.h.
#pragma once

#include "common.h"

#ifdef MT_X86
#include <cstring>

#include "group/encode_avx512.h"
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

// The upper halves, rounded to nearest even.
MT_INLINE __m512i to_bfloat(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7FC0));
}

template <int kBits, typename T>
MT_INLINE void decode_bits(const uint8_t* in, T* out, int64_t size, __m512 values) {
  constexpr int kLanes = lanes_of(kBits), kBytes = kLanes * kBits / 8;
  const int64_t width = size / kLanes;
  const __m512i table = sizeof(T) == 2 ? to_bfloat(values) : _mm512_castps_si512(values);
  const auto positions = [&](int64_t c, __mmask16 some) __attribute__((always_inline)) {
    __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (int k = 0; k < kBytes; ++k) {
      const __m128i bytes = _mm_maskz_loadu_epi8(some, in + k * width + c);
      word = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 8 * k));
    }
#pragma GCC unroll 8
    for (int l = 0; l < kLanes; ++l) {
      // Only an index's low 4 bits count, and the table repeats itself.
      const __m512i index = _mm512_srli_epi32(word, kBits * l);
      const __m512i value = _mm512_permutexvar_epi32(index, table);
      T* to = out + l * width + c;
      if constexpr (sizeof(T) == 2)
        _mm256_mask_storeu_epi16(to, some, _mm512_cvtepi32_epi16(value));
      else
        _mm512_mask_storeu_epi32(to, some, value);
    }
  };
  int64_t c = 0;
  for (; c + 16 <= width; c += 16) positions(c, 0xFFFF);
  if (c < width)
    positions(c, static_cast<__mmask16>(_bzhi_u32(0xFFFF, static_cast<uint32_t>(width - c))));
}

bool can_decode(int64_t bits) { return mt_isa() >= 2 && bits <= 4; }

template <typename T>
MT_INLINE void decode_group(const uint8_t* in, T* out, int64_t size, int64_t bits, float base,
                            float step) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i code = _mm512_and_si512(lane, _mm512_set1_epi32((1 << bits) - 1));
  const __m512 steps = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(step));
  const __m512 values =
      _mm512_mul_ps(_mm512_add_ps(_mm512_set1_ps(base), steps), _mm512_set1_ps(2.0f));
  if (bits == 1) decode_bits<1>(in, out, size, values);
  if (bits == 2) decode_bits<2>(in, out, size, values);
  if (bits == 3) decode_bits<3>(in, out, size, values);
  if (bits == 4) decode_bits<4>(in, out, size, values);
}

void decode_floats(const uint8_t* in, float* out, int64_t size, int64_t bits, float base,
                   float step) {
  decode_group(in, out, size, bits, base, step);
}

void decode_bfloats(const uint8_t* in, uint16_t* out, int64_t size, int64_t bits, float base,
                    float step) {
  decode_group(in, out, size, bits, base, step);
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

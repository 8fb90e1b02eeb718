// Group dequantisation with AVX-512: levels from a table in a register. Results as in group.cpp.
// Quantisation: encode_avx512.h.
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

// The levels of codes of so many bits, again and again.
MT_INLINE __m512 levels_of(int64_t bits, float base, float step) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i code = _mm512_and_si512(lane, _mm512_set1_epi32((1 << bits) - 1));
  const __m512 steps = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(step));
  return _mm512_mul_ps(_mm512_add_ps(_mm512_set1_ps(base), steps), _mm512_set1_ps(2.0f));
}

template <typename T>
MT_INLINE void decode_group(const uint8_t* in, T* out, int64_t size, int64_t bits, float base,
                            float step) {
  const __m512 values = levels_of(bits, base, step);
  if (bits == 1) decode_bits<1>(in, out, size, values);
  if (bits == 2) decode_bits<2>(in, out, size, values);
  if (bits == 3) decode_bits<3>(in, out, size, values);
  if (bits == 4) decode_bits<4>(in, out, size, values);
}

constexpr int64_t kShort = 64;  // elements of groups whose bytes fit a register, two to each

// Where the codes of thirty-two elements lie among their group's bytes: in one, or in two.
struct Gather {
  __m512i low, high, shift;
  __mmask32 some;  // of the elements: those that there are
};

MT_INLINE Gather gather_of(int64_t size, int64_t bits, int64_t first) {
  const int64_t width = size / lanes_of(static_cast<int>(bits));
  uint16_t low[32] = {}, high[32] = {}, shift[32] = {};
  const int64_t count = std::clamp<int64_t>(size - first, 0, 32);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t lane = (first + i) / width, position = (first + i) % width, bit = lane * bits;
    low[i] = static_cast<uint16_t>(bit / 8 * width + position), shift[i] = bit % 8;
    high[i] = static_cast<uint16_t>(low[i] + (bit % 8 + bits > 8 ? width : 0));
  }
  return {_mm512_loadu_si512(low), _mm512_loadu_si512(high), _mm512_loadu_si512(shift),
          _bzhi_u32(~0u, static_cast<uint32_t>(count))};
}

MT_INLINE void store_levels(uint16_t* out, __mmask32 some, __m512i code, __m512 levels) {
  const __m256i table = _mm512_cvtepi32_epi16(to_bfloat(levels));
  const __m512i both = _mm512_broadcast_i64x4(table);
  _mm512_mask_storeu_epi16(out, some, _mm512_permutexvar_epi16(code, both));
}

MT_INLINE void store_levels(float* out, __mmask32 some, __m512i code, __m512 levels) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(code));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(code, 1));
  _mm512_mask_storeu_ps(out, static_cast<__mmask16>(some), _mm512_permutexvar_ps(low, levels));
  const auto rest = static_cast<__mmask16>(some >> 16);
  _mm512_mask_storeu_ps(out + 16, rest, _mm512_permutexvar_ps(high, levels));
}

// Groups of up to `kShort` elements that follow each other, with half of each one's minimum and
// half its step: only an index's low bits count, as in `decode_bits`.
template <typename T>
void decode_short(const uint8_t* in, T* out, int64_t size, int64_t bits, int64_t count,
                  const float* base, const float* step) {
  const Gather elements[2] = {gather_of(size, bits, 0), gather_of(size, bits, 32)};
  const int64_t bytes = size / 8 * bits;
  const auto some = static_cast<__mmask32>(_bzhi_u32(~0u, static_cast<uint32_t>(bytes)));
  for (int64_t g = 0; g < count; ++g, in += bytes, out += size) {
    const __m512 levels = levels_of(bits, base[g], step[g]);
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(some, in));
    for (int k = 0; k < 2 && elements[k].some; ++k) {
      const Gather& e = elements[k];
      const __m512i high = _mm512_slli_epi16(_mm512_permutexvar_epi16(e.high, wide), 8);
      const __m512i word = _mm512_or_si512(_mm512_permutexvar_epi16(e.low, wide), high);
      store_levels(out + 32 * k, e.some, _mm512_srlv_epi16(word, e.shift), levels);
    }
  }
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

// Float32 numbers and their bits, and those of bfloat16 and float16.
#pragma once

#include <cstring>

#include "common.h"

namespace memtrain {

enum FloatType : int64_t { kFloat32, kBfloat16, kFloat16 };

MT_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

MT_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

MT_INLINE float from_bfloat(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

MT_INLINE float from_half(uint16_t x) {
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7FFFu) << 13;
  // Subnormals by a difference of normal numbers: right where the unit flushes them.
  const float small = float_of(0x38800000u + magnitude) - 0x1p-14f;
  const uint32_t special = magnitude >= 0x0F800000u ? 0x38000000u : 0u;
  const uint32_t normal = magnitude + 0x38000000u + special;
  const uint32_t value = magnitude < 0x00800000u ? bits_of(small) : normal;
  return float_of(value | static_cast<uint32_t>(x & 0x8000u) << 16);
}

// Both round to the nearest, ties to even.
MT_INLINE uint16_t to_bfloat(float x) {
  const uint32_t bits = bits_of(x), even = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7FC0u : even);
}

MT_INLINE uint16_t to_half(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFFu;
  // Below 2**-14 the sum with 0.5 has its last bit where the half's is: the addition rounds.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // 65520 and more
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

}  // namespace memtrain

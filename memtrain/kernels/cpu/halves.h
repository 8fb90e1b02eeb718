// Float32, bfloat16 and float16 tensors read and written as float32, a run at a time.
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

MT_CLONES static void read_floats(const void* x, int64_t type, int64_t from, int64_t n,
                                  float* out) {
  const uint16_t* half = static_cast<const uint16_t*>(x) + from;
  if (type == kFloat32)
    std::memcpy(out, static_cast<const float*>(x) + from, n * 4);
  else if (type == kBfloat16)
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(half[i]) << 16);
  else
    for (int64_t i = 0; i < n; ++i) out[i] = from_half(half[i]);
}

MT_CLONES static void write_floats(void* x, int64_t type, int64_t from, int64_t n,
                                   const float* in) {
  uint16_t* half = static_cast<uint16_t*>(x) + from;
  if (type == kFloat32)
    std::memcpy(static_cast<float*>(x) + from, in, n * 4);
  else if (type == kBfloat16)
    for (int64_t i = 0; i < n; ++i) half[i] = to_bfloat(in[i]);
  else
    for (int64_t i = 0; i < n; ++i) half[i] = to_half(in[i]);
}

}  // namespace memtrain

// Float32, bfloat16 and float16 tensors read and written as float32, a run at a time.
#pragma once

#include "halves.h"

namespace memtrain {

MT_CLONES static void read_floats(const void* x, int64_t type, int64_t from, int64_t n,
                                  float* out) {
  const uint16_t* half = static_cast<const uint16_t*>(x) + from;
  if (type == kFloat32)
    std::memcpy(out, static_cast<const float*>(x) + from, n * 4);
  else if (type == kBfloat16)
    for (int64_t i = 0; i < n; ++i) out[i] = from_bfloat(half[i]);
  else
    for (int64_t i = 0; i < n; ++i) out[i] = from_half(half[i]);
}

[[maybe_unused]] MT_CLONES static void write_floats(void* x, int64_t type, int64_t from, int64_t n,
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

// The part of rounding.cpp in AVX-512.
#pragma once

#include "common.h"

namespace memtrain {

struct FloatForm {
  int32_t mantissa, least, limit, over_bits, over_code, nan, mark, infinity, rounding;
};

// Whether the machine and the format are such that the other two may be called.
bool floats_fit(const FloatForm& f);

// Elements [begin, end); types and `bytes` as mt_floats_round has them. Returns the overflows.
int64_t floats_round(const void* x, void* out, int64_t begin, int64_t end, const FloatForm& f,
                     int64_t type, int64_t bytes);
void floats_decode(const void* codes, int64_t bytes, void* out, int64_t begin, int64_t end,
                   const FloatForm& f, int64_t type);

}  // namespace memtrain

// Group quantisation of a tile, whose last group need not be whole, and the way back.
#pragma once

#include "group/group.h"

namespace memtrain {

// Quantises `n` numbers, the groups from number `begin` on of a tensor that ends with them where
// the last is not whole. `buffer` and `scratch` have room for a group.
void quantize_tile(const float* x, int64_t begin, int64_t n, const Quantizer& to, float* buffer,
                   uint8_t* scratch);

// The numbers of whole groups number `begin` to `end - 1`.
void dequantize_tile(const Quantizer& from, int64_t begin, int64_t end, float* out);

}  // namespace memtrain

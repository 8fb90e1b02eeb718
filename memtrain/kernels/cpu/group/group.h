// Group quantisation for other kernels: of numbers that were just made, piece by piece.
#pragma once

#include <cstdint>

namespace memtrain {

struct Quantizer {
  uint8_t* codes;
  void* bounds;
  int64_t wide, bits, size, seed, stochastic;
};

// Quantises whole groups number `begin` to `end - 1` of a tensor; `x` has theirs alone, and
// `scratch` room for a group's codes.
void quantize_groups(const float* x, int64_t begin, int64_t end, const Quantizer& to,
                     uint8_t* scratch);

}  // namespace memtrain

// Random bits of stochastic rounding to floats.
#pragma once

#include "common.h"

namespace memtrain {

constexpr int64_t kDrawn = 1024;  // elements that share their Philox counters: BLOCK of rounding.py

// 16 random bits for each element of a block of kDrawn (definition: `uniform_blocks` of
// kernels/random/philox.py).
void draw_block(int64_t block, uint64_t seed, uint16_t* bits);

}  // namespace memtrain

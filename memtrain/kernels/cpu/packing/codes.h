// The layout of packed codes (kernels/packing/bits.py).
#pragma once

#include <type_traits>

#include "common.h"

namespace memtrain {

constexpr int lanes_of(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

}  // namespace memtrain

// The layout of packed codes (kernels/packing/bits.py).
#pragma once

#include "common.h"

// CALL of the constant that the variable `bits` equals.
#define MT_BITS_SWITCH(CALL)                     \
  switch (bits) {                                \
    case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; \
    case 4: CALL(4); break; case 5: CALL(5); break; case 6: CALL(6); break; \
    case 7: CALL(7); break; case 8: CALL(8); break; \
  }

namespace memtrain {

constexpr int lanes_of(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

}  // namespace memtrain

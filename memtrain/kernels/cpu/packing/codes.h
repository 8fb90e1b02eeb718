// Codes of 1 to 8 bits, a byte each, packed to the bit (layout: kernels/packing/bits.py).
#pragma once

#include <cstring>

#include "common.h"

// CALL of the constant that the variable `bits` equals.
#define MT_BITS_SWITCH(CALL)                     \
  switch (bits) {                                \
    case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; \
    case 4: CALL(4); break; case 5: CALL(5); break; case 6: CALL(6); break; \
    case 7: CALL(7); break; case 8: CALL(8); break; \
  }

namespace memtrain {

constexpr int64_t lanes_of(int64_t bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

// One lane's part: its low bits go to byte `lane * bits / 8`, the rest to the next
// one. Only the low `bits` bits of a code count.
MT_INLINE void pack(const uint8_t* __restrict codes, uint8_t* __restrict out, int64_t size,
                    int64_t bits) {
  const int64_t lanes = lanes_of(bits), width = size / lanes;
  const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
  std::memset(out, 0, size / 8 * bits);
  for (int64_t l = 0; l < lanes; ++l) {
    const int shift = static_cast<int>(l * bits % 8);
    const uint8_t* from = codes + l * width;
    uint8_t* to = out + l * bits / 8 * width;
    for (int64_t c = 0; c < width; ++c) to[c] |= static_cast<uint8_t>((from[c] & mask) << shift);
    if (shift + bits > 8)
      for (int64_t c = 0; c < width; ++c)
        to[width + c] |= static_cast<uint8_t>((from[c] & mask) >> (8 - shift));
  }
}

MT_INLINE void unpack(const uint8_t* __restrict in, uint8_t* __restrict codes, int64_t size,
                      int64_t bits) {
  const int64_t lanes = lanes_of(bits), width = size / lanes;
  const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
  for (int64_t l = 0; l < lanes; ++l) {
    const int shift = static_cast<int>(l * bits % 8);
    const uint8_t* from = in + l * bits / 8 * width;
    uint8_t* to = codes + l * width;
    if (shift + bits > 8)
      for (int64_t c = 0; c < width; ++c)
        to[c] = static_cast<uint8_t>((from[c] >> shift) | (from[width + c] << (8 - shift))) & mask;
    else
      for (int64_t c = 0; c < width; ++c) to[c] = static_cast<uint8_t>(from[c] >> shift) & mask;
  }
}

}  // namespace memtrain

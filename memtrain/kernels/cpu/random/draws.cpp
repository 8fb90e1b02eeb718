// Random bits of stochastic rounding to floats.
#ifndef MT_LANES
#define MT_SELF "random/draws.cpp"
#include "random/draws.h"
#include "foreach_isa.h"

namespace memtrain {

void draw_block(int64_t block, uint64_t seed, uint16_t* bits) {
  MT_DISPATCH(draw_bits(block, seed, bits));
}

}  // namespace memtrain

#else

#include "random/philox.h"

inline void draw_bits(int64_t block, uint64_t seed, uint16_t* bits) {
  constexpr int64_t kWidth = kDrawn / 8;
  for (int64_t c = 0; c < kWidth; c += 16) {
    I words[4];
    draw(static_cast<uint32_t>(block * kWidth + c), seed, words);
    for (int s = 0; s < 8; ++s)
      narrow(bits + s * kWidth + c, s % 2 ? words[s / 2] >> 16 : words[s / 2]);
  }
}

#endif

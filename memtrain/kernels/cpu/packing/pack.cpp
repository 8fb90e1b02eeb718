// Small unsigned integers at 1 to 8 bits (definition: kernels/packing/pack.py, layout: kernels/packing/bits.py).
#include <cstring>

#include "common.h"

namespace memtrain {

constexpr int64_t kCodes = 256;

constexpr int64_t lanes_of(int64_t bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

// One lane's part of a block: its low bits go to byte `lane * bits / 8`, the rest to the next one.
MT_INLINE void pack_block(const uint8_t* __restrict x, uint8_t* __restrict out, int64_t bits) {
  const int64_t lanes = lanes_of(bits), width = kCodes / lanes;
  const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
  std::memset(out, 0, kCodes / 8 * bits);
  for (int64_t l = 0; l < lanes; ++l) {
    const int shift = l * bits % 8;
    const uint8_t* from = x + l * width;
    uint8_t* to = out + l * bits / 8 * width;
    for (int64_t c = 0; c < width; ++c) to[c] |= static_cast<uint8_t>((from[c] & mask) << shift);
    if (shift + bits > 8)
      for (int64_t c = 0; c < width; ++c)
        to[width + c] |= static_cast<uint8_t>((from[c] & mask) >> (8 - shift));
  }
}

MT_INLINE void unpack_block(const uint8_t* __restrict in, uint8_t* __restrict x, int64_t bits) {
  const int64_t lanes = lanes_of(bits), width = kCodes / lanes;
  const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
  for (int64_t l = 0; l < lanes; ++l) {
    const int shift = l * bits % 8;
    const uint8_t* from = in + l * bits / 8 * width;
    uint8_t* to = x + l * width;
    if (shift + bits > 8)
      for (int64_t c = 0; c < width; ++c)
        to[c] = static_cast<uint8_t>((from[c] >> shift) | (from[width + c] << (8 - shift))) & mask;
    else
      for (int64_t c = 0; c < width; ++c) to[c] = static_cast<uint8_t>(from[c] >> shift) & mask;
  }
}

MT_CLONES static void pack_range(const uint8_t* x, uint8_t* out, int64_t n, int64_t bits,
                                 int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = n - b * kCodes;
    uint8_t tail[kCodes] = {};
    if (left < kCodes) std::memcpy(tail, x + b * kCodes, left);
    pack_block(left < kCodes ? tail : x + b * kCodes, out + b * (kCodes / 8 * bits), bits);
  }
}

MT_CLONES static void unpack_range(const uint8_t* packed, uint8_t* x, int64_t n, int64_t bits,
                                   int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = n - b * kCodes;
    uint8_t tail[kCodes];
    unpack_block(packed + b * (kCodes / 8 * bits), left < kCodes ? tail : x + b * kCodes, bits);
    if (left < kCodes) std::memcpy(x + b * kCodes, tail, left);
  }
}

}  // namespace memtrain

MT_EXPORT void mt_pack_codes(const uint8_t* x, uint8_t* out, int64_t n, int64_t bits,
                             int64_t threads) {
  memtrain::parallel_for((n + 255) / 256, 1024, threads, [=](int64_t begin, int64_t end) {
    memtrain::pack_range(x, out, n, bits, begin, end);
  });
}

MT_EXPORT void mt_unpack_codes(const uint8_t* packed, uint8_t* x, int64_t n, int64_t bits,
                               int64_t threads) {
  memtrain::parallel_for((n + 255) / 256, 1024, threads, [=](int64_t begin, int64_t end) {
    memtrain::unpack_range(packed, x, n, bits, begin, end);
  });
}

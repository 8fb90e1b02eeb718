// Small unsigned integers and masks at 1 to 8 bits (definition: kernels/packing/pack.py).
#ifndef MT_LANES
#define MT_SELF "packing/pack.cpp"
#include <cstring>

#include "common.h"

namespace memtrain {

constexpr int64_t kCodes = 256;  // of a block

struct Packing {
  const uint8_t* in;
  uint8_t* out;
  int64_t n, bits, threads;
};

}  // namespace memtrain

#include "foreach_isa.h"

MT_EXPORT void mt_pack_codes(const memtrain::Packing* call) {
  const memtrain::Packing c = *call;
  memtrain::parallel_for((c.n + 255) / 256, 1024, c.threads, [&c](int64_t begin, int64_t end) {
    MT_DISPATCH(pack(c, begin, end));
  });
}

MT_EXPORT void mt_unpack_codes(const memtrain::Packing* call) {
  const memtrain::Packing c = *call;
  memtrain::parallel_for((c.n + 255) / 256, 1024, c.threads, [&c](int64_t begin, int64_t end) {
    MT_DISPATCH(unpack(c, begin, end));
  });
}

#else

#include "packing/slices.h"

template <int kBits>
inline void pack_blocks(const Packing& c, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = c.n - b * kCodes;
    uint8_t room[kCodes] = {};
    const uint8_t* x = c.in + b * kCodes;
    if (left < kCodes) x = static_cast<uint8_t*>(std::memcpy(room, x, left));
    for (int at = 0; at < 32; at += 16) {
      I codes[8];
      MT_UNROLL(8)
      for (int s = 0; s < 8; ++s) codes[s] = widen(x + 32 * s + at) & ((1 << kBits) - 1);
      store_codes<kBits>(c.out + b * (32 * kBits) + at, codes, 32);
    }
  }
}

template <int kBits>
inline void unpack_blocks(const Packing& c, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = c.n - b * kCodes;
    uint8_t room[kCodes];
    uint8_t* x = left < kCodes ? room : c.out + b * kCodes;
    for (int at = 0; at < 32; at += 16) {
      I codes[8];
      load_codes<kBits>(c.in + b * (32 * kBits) + at, codes, 32);
      MT_UNROLL(8)
      for (int s = 0; s < 8; ++s) narrow(x + 32 * s + at, codes[s]);
    }
    if (left < kCodes) std::memcpy(c.out + b * kCodes, room, left);
  }
}

inline void pack(const Packing& c, int64_t begin, int64_t end) {
  with_bits(c.bits, [&](auto bits) { pack_blocks<bits>(c, begin, end); });
}

inline void unpack(const Packing& c, int64_t begin, int64_t end) {
  with_bits(c.bits, [&](auto bits) { unpack_blocks<bits>(c, begin, end); });
}

#endif

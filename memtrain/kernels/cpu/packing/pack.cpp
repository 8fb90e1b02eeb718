// Small unsigned integers and masks at 1 to 8 bits (definition: kernels/packing/pack.py, layout:
// kernels/packing/bits.py).
#include "packing/codes.h"

namespace memtrain {

constexpr int64_t kCodes = 256;

MT_CLONES static void pack_range(const uint8_t* x, uint8_t* out, int64_t n, int64_t bits,
                                 int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = n - b * kCodes;
    uint8_t tail[kCodes] = {};
    if (left < kCodes) std::memcpy(tail, x + b * kCodes, left);
    pack(left < kCodes ? tail : x + b * kCodes, out + b * (kCodes / 8 * bits), kCodes, bits);
  }
}

MT_CLONES static void unpack_range(const uint8_t* packed, uint8_t* x, int64_t n, int64_t bits,
                                   int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = n - b * kCodes;
    uint8_t tail[kCodes];
    unpack(packed + b * (kCodes / 8 * bits), left < kCodes ? tail : x + b * kCodes, kCodes, bits);
    if (left < kCodes) std::memcpy(x + b * kCodes, tail, left);
  }
}

}  // namespace memtrain

struct PackCodes {
  const uint8_t* x;
  uint8_t* out;
  int64_t n, bits, threads;
};

MT_EXPORT void mt_pack_codes(const PackCodes* call) {
  const PackCodes c = *call;
  memtrain::parallel_for((c.n + 255) / 256, 1024, c.threads, [&c](int64_t begin, int64_t end) {
    memtrain::pack_range(c.x, c.out, c.n, c.bits, begin, end);
  });
}

MT_EXPORT void mt_unpack_codes(const uint8_t* packed, uint8_t* x, int64_t n, int64_t bits,
                               int64_t threads) {
  memtrain::parallel_for((n + 255) / 256, 1024, threads, [=](int64_t begin, int64_t end) {
    memtrain::unpack_range(packed, x, n, bits, begin, end);
  });
}

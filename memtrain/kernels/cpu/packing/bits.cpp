// One bit per element: masks of dropout and of boolean tensors (layout: kernels/packing/bits.py).
#include "common.h"

namespace memtrain {

constexpr int64_t kBlock = 256, kLane = 32;

MT_CLONES static void pack_mask_range(const uint8_t* x, uint8_t* out, int64_t n, int64_t begin,
                                      int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t* in = x + b * kBlock;
    uint8_t* to = out + b * kLane;
    if ((b + 1) * kBlock <= n) {
      for (int c = 0; c < kLane; ++c) {
        uint8_t byte = 0;
        for (int l = 0; l < 8; ++l) byte |= static_cast<uint8_t>((in[l * kLane + c] != 0) << l);
        to[c] = byte;
      }
    } else {
      for (int c = 0; c < kLane; ++c) to[c] = 0;
      for (int64_t i = 0; i < n - b * kBlock; ++i)
        to[i % kLane] |= static_cast<uint8_t>((in[i] != 0) << (i / kLane));
    }
  }
}

MT_CLONES static void unpack_mask_range(const uint8_t* packed, uint8_t* out, int64_t n,
                                        int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t* in = packed + b * kLane;
    uint8_t* to = out + b * kBlock;
    int64_t left = std::min(kBlock, n - b * kBlock);
    if (left == kBlock) {
      for (int l = 0; l < 8; ++l)
        for (int c = 0; c < kLane; ++c) to[l * kLane + c] = (in[c] >> l) & 1;
    } else {
      for (int64_t i = 0; i < left; ++i) to[i] = (in[i % kLane] >> (i / kLane)) & 1;
    }
  }
}

}  // namespace memtrain

struct PackMask {
  const uint8_t* x;
  uint8_t* out;
  int64_t n, threads;
};

MT_EXPORT void mt_pack_mask(const PackMask* call) {
  const PackMask c = *call;
  memtrain::parallel_for((c.n + 255) / 256, 2048, c.threads, [&c](int64_t begin, int64_t end) {
    memtrain::pack_mask_range(c.x, c.out, c.n, begin, end);
  });
}

MT_EXPORT void mt_unpack_mask(const uint8_t* packed, uint8_t* out, int64_t n, int64_t threads) {
  memtrain::parallel_for((n + 255) / 256, 2048, threads, [=](int64_t begin, int64_t end) {
    memtrain::unpack_mask_range(packed, out, n, begin, end);
  });
}

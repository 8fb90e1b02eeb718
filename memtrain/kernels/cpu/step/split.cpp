// A float32 weight as bfloat16 and a correction (definition: kernels/step/split.py).
#include <cstring>

#include "step/weights.h"

namespace memtrain {

constexpr int64_t kBlock = kDrawn, kWidth = kBlock / 8;

template <typename Correction, int KEPT>
MT_INLINE void split_loop(const uint32_t* __restrict master, uint16_t* __restrict weight,
                          Correction* __restrict correction, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    split_one<Correction, KEPT, false>(master[i], 0, weight + i, correction + (KEPT ? i : 0));
}

MT_CLONES static void split_range(const uint32_t* master, uint16_t* weight, void* correction,
                                  int64_t kept, int64_t begin, int64_t end) {
  if (kept == 16)
    split_loop<int16_t, 16>(master, weight, static_cast<int16_t*>(correction), begin, end);
  else if (kept == 8)
    split_loop<int8_t, 8>(master, weight, static_cast<int8_t*>(correction), begin, end);
  else
    split_loop<int8_t, 0>(master, weight, nullptr, begin, end);
}

MT_INLINE void draw_block(const uint32_t* __restrict master, uint16_t* __restrict weight,
                          uint32_t first, uint64_t seed) {
  uint32_t words[4][16];
  for (int64_t c = 0; c < kWidth; c += 16) {
    philox_piece<16>(first + static_cast<uint32_t>(c), seed, words);
    for (int s = 0; s < 8; ++s) {
      const int64_t at = s * kWidth + c;
      const int shift = s % 2 * 16;
      for (int i = 0; i < 16; ++i) {
        const uint32_t draw = words[s / 2][i] >> shift & 0xFFFFu;
        split_one<int8_t, 0, true>(master[at + i], draw, weight + at + i, nullptr);
      }
    }
  }
}

MT_CLONES static void draw_range(const uint32_t* master, uint16_t* weight, int64_t n,
                                 uint64_t seed, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t left = n - b * kBlock;
    const uint32_t first = static_cast<uint32_t>(b * kWidth);
    if (left >= kBlock) {
      draw_block(master + b * kBlock, weight + b * kBlock, first, seed);
      continue;
    }
    uint32_t tail[kBlock] = {};
    uint16_t rounded[kBlock];
    std::memcpy(tail, master + b * kBlock, left * sizeof(uint32_t));
    draw_block(tail, rounded, first, seed);
    std::memcpy(weight + b * kBlock, rounded, left * sizeof(uint16_t));
  }
}

template <typename Correction>
MT_INLINE void merge_loop(const uint16_t* __restrict weight,
                          const Correction* __restrict correction, uint32_t* __restrict master,
                          int shift, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t difference = static_cast<uint32_t>(static_cast<int32_t>(correction[i]));
    master[i] = (static_cast<uint32_t>(weight[i]) << 16) + (difference << shift);
  }
}

MT_CLONES static void merge_range(const uint16_t* weight, const void* correction, uint32_t* master,
                                  int64_t kept, int64_t begin, int64_t end) {
  if (kept == 16)
    merge_loop(weight, static_cast<const int16_t*>(correction), master, 0, begin, end);
  else if (kept == 8)
    merge_loop(weight, static_cast<const int8_t*>(correction), master, 8, begin, end);
  else
    for (int64_t i = begin; i < end; ++i) master[i] = static_cast<uint32_t>(weight[i]) << 16;
}

}  // namespace memtrain

MT_EXPORT void mt_split(const uint32_t* master, uint16_t* weight, void* correction, int64_t n,
                        int64_t kept, int64_t seed, int64_t stochastic, int64_t threads) {
  if (stochastic) {
    const int64_t blocks = (n + memtrain::kBlock - 1) / memtrain::kBlock;
    memtrain::parallel_for(blocks, 32, threads, [=](int64_t begin, int64_t end) {
      memtrain::draw_range(master, weight, n, static_cast<uint64_t>(seed), begin, end);
    });
    return;
  }
  memtrain::parallel_for(n, 65536, threads, [=](int64_t begin, int64_t end) {
    memtrain::split_range(master, weight, correction, kept, begin, end);
  });
}

MT_EXPORT void mt_merge(const uint16_t* weight, const void* correction, uint32_t* master,
                        int64_t n, int64_t kept, int64_t threads) {
  memtrain::parallel_for(n, 65536, threads, [=](int64_t begin, int64_t end) {
    memtrain::merge_range(weight, correction, master, kept, begin, end);
  });
}

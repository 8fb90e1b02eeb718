// Group quantisation for other kernels: of numbers that were just made, piece by piece.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace memtrain {

struct Quantizer {
  uint8_t* codes;
  void* bounds;
  int64_t wide, bits, size, seed, stochastic;
};

// Groups that are worked on together: what is read again is still in the nearest cache. An even
// number, since two groups share their draws.
inline int64_t groups_together(int64_t size) {
  return std::max<int64_t>(4096 / size / 2 * 2, 2);
}

// Room for such groups, and for what vectors reach past their ends; in whole cache lines.
class Scratch {
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> words_, numbers_, bytes_;

 public:
  const int64_t stride;  // from one of a draw's four words to the next
  explicit Scratch(int64_t size)
      : words_((groups_together(size) / 2 + 1) * (size / 8) / 4 + 8),
        numbers_(groups_together(size) * size / 16 + 2),
        bytes_(size / 64 + 2),
        stride(static_cast<int64_t>(words_.size()) / 4 * 16) {}
  int32_t* words() { return reinterpret_cast<int32_t*>(words_.data()); }
  float* numbers() { return reinterpret_cast<float*>(numbers_.data()); }
  uint8_t* bytes() { return bytes_.data()->bytes; }
};

// Quantises whole groups number `begin` to `end - 1` of a tensor; `x` has theirs alone, and sixteen
// numbers more that may be read.
void quantize_groups(const float* x, int64_t begin, int64_t end, const Quantizer& to,
                     Scratch& scratch);

}  // namespace memtrain

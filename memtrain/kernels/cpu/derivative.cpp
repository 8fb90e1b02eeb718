// Few-bit derivative codes (contract: kernels/derivative.py; layout: kernels/bits.py).
#include <cmath>
#include <cstring>
#include <utility>

#include "common.h"

namespace memtrain {
namespace {

constexpr int64_t kBlock = 256, kGrain = 128;  // a thread's piece: 128 blocks, some 10 us

// Lanes of a block, positions of a lane, bytes of a position's word.
template <int kBits>
struct Layout {
  static constexpr int lanes = kBits == 4 ? 2 : kBits == 2 ? 4 : 8;
  static constexpr int width = kBlock / lanes;
  static constexpr int bytes = lanes * kBits / 8;
  static constexpr int levels = 1 << kBits;
};

template <int kBits>
using Lanes = std::make_index_sequence<Layout<kBits>::lanes>;
template <int kBits>
using Bytes = std::make_index_sequence<Layout<kBits>::bytes>;

struct Bf16 { uint16_t bits; };

MT_INLINE float load(float x) { return x; }
MT_INLINE float load(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
MT_INLINE double load(double x) { return x; }

MT_INLINE void store(float x, float& out) { out = x; }
MT_INLINE void store(double x, double& out) { out = x; }
MT_INLINE void store(float x, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t even = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even
  out.bits = static_cast<uint16_t>(x != x ? 0x7FC0u : even);
}

// Loops over boundaries and lanes are folds, so that one plain loop over positions is left, which
// the compiler vectorises.
template <size_t... kIndex>
MT_INLINE uint32_t count_below(float v, const float* boundary, std::index_sequence<kIndex...>) {
  return (0u + ... + (v > boundary[kIndex] ? 1u : 0u));
}

template <int kBits, bool kEven, typename T>
MT_INLINE uint32_t code_of(T x, const float* boundary) {
  float v = load(x);
  return count_below(kEven ? std::fabs(v) : v, boundary,
                     std::make_index_sequence<Layout<kBits>::levels - 1>());
}

template <int kBits, bool kEven, typename T, size_t... kLane, size_t... kByte>
MT_INLINE void encode_block(const T* x, const float* boundary, uint8_t* out,
                            std::index_sequence<kLane...>, std::index_sequence<kByte...>) {
  constexpr int width = Layout<kBits>::width;
  // Two loops: with the bytes stored in the first, the compiler would take 64 lanes and spill.
  uint32_t word[width];
  for (int c = 0; c < width; ++c)
    word[c] =
        (0u | ... | (code_of<kBits, kEven>(x[kLane * width + c], boundary) << (kBits * kLane)));
  for (int c = 0; c < width; ++c)
    ((out[kByte * width + c] = static_cast<uint8_t>(word[c] >> (8 * kByte))), ...);
}

template <int kBits, bool kEven, typename T>
MT_INLINE void encode_range(const T* x, const float* boundaries, uint8_t* out, int64_t n,
                            int64_t begin, int64_t end) {
  constexpr int64_t kBytes = kBlock * kBits / 8;
  float boundary[Layout<kBits>::levels];  // a local copy: `out` could alias the argument
  std::memcpy(boundary, boundaries, sizeof(float) * (Layout<kBits>::levels - 1));
  for (int64_t b = begin; b < end; ++b) {
    const T* in = x + b * kBlock;
    T last[kBlock];
    if ((b + 1) * kBlock > n) {
      std::memset(last, 0, sizeof(last));
      std::memcpy(last, in, sizeof(T) * (n - b * kBlock));
      in = last;
    }
    encode_block<kBits, kEven>(in, boundary, out + b * kBytes, Lanes<kBits>(), Bytes<kBits>());
  }
}

template <bool kEven, typename T>
MT_INLINE void encode_bits(const T* x, const float* boundaries, uint8_t* out, int64_t n,
                           int64_t count, int64_t begin, int64_t end) {
  if (count == 1) encode_range<1, kEven>(x, boundaries, out, n, begin, end);
  if (count == 3) encode_range<2, kEven>(x, boundaries, out, n, begin, end);
  if (count == 7) encode_range<3, kEven>(x, boundaries, out, n, begin, end);
  if (count == 15) encode_range<4, kEven>(x, boundaries, out, n, begin, end);
}

template <typename T>
MT_INLINE void encode_any(const T* x, const float* boundaries, uint8_t* out, int64_t n,
                          int64_t count, int64_t even, int64_t begin, int64_t end) {
  if (even)
    encode_bits<true>(x, boundaries, out, n, count, begin, end);
  else
    encode_bits<false>(x, boundaries, out, n, count, begin, end);
}

// A tree of selects over the code's bits: no gather, and every level exact. Selecting by and/xor
// on the levels' bit patterns leaves nothing to branch on.
template <int kBits>
MT_INLINE uint32_t select(uint32_t code, const uint32_t* level) {
  if constexpr (kBits == 0) {
    return level[0];
  } else {
    uint32_t low = select<kBits - 1>(code, level);
    uint32_t high = select<kBits - 1>(code, level + (1 << (kBits - 1)));
    uint32_t chosen = 0u - ((code >> (kBits - 1)) & 1u);
    return low ^ ((low ^ high) & chosen);
  }
}

// out = grad * level; with kLevels, out = level and grad is not read.
template <int kBits, bool kLevels, typename T>
MT_INLINE void backward_one(const T* grad, uint32_t code, const uint32_t* level, T* out) {
  uint32_t bits = select<kBits>(code, level);
  float value;
  std::memcpy(&value, &bits, 4);
  if constexpr (kLevels)
    store(value, *out);
  else
    store(load(*grad) * value, *out);
}

template <int kBits, bool kLevels, typename T, size_t... kLane, size_t... kByte>
MT_INLINE void backward_block(const T* grad, const uint8_t* codes, const uint32_t* level, T* out,
                              std::index_sequence<kLane...>, std::index_sequence<kByte...>) {
  constexpr int width = Layout<kBits>::width;
#pragma GCC ivdep
  for (int c = 0; c < width; ++c) {
    uint32_t word =
        (0u | ... | (static_cast<uint32_t>(codes[kByte * width + c]) << (8 * kByte)));
    (backward_one<kBits, kLevels>(grad + kLane * width + c, word >> (kBits * kLane), level,
                                  out + kLane * width + c), ...);
  }
}

template <int kBits, bool kLevels, typename T>
MT_INLINE void backward_range(const T* grad, const uint8_t* codes, const float* levels, T* out,
                              int64_t n, int64_t begin, int64_t end) {
  constexpr int64_t kBytes = kBlock * kBits / 8;
  uint32_t level[Layout<kBits>::levels];  // a local copy: `out` could alias the argument
  std::memcpy(level, levels, sizeof(level));
  for (int64_t b = begin; b < end; ++b) {
    const T* in = grad + (kLevels ? 0 : b * kBlock);
    T* to = out + b * kBlock;
    int64_t left = std::min(kBlock, n - b * kBlock);
    if (left == kBlock) {
      backward_block<kBits, kLevels>(in, codes + b * kBytes, level, to, Lanes<kBits>(), Bytes<kBits>());
    } else {
      T first[kBlock], result[kBlock];
      std::memset(first, 0, sizeof(first));
      if (!kLevels) std::memcpy(first, in, sizeof(T) * left);
      backward_block<kBits, kLevels>(first, codes + b * kBytes, level, result, Lanes<kBits>(),
                                     Bytes<kBits>());
      std::memcpy(to, result, sizeof(T) * left);
    }
  }
}

template <bool kLevels, typename T>
MT_INLINE void backward_any(const T* grad, const uint8_t* codes, const float* levels, T* out,
                            int64_t n, int64_t count, int64_t begin, int64_t end) {
  if (count == 2) backward_range<1, kLevels>(grad, codes, levels, out, n, begin, end);
  if (count == 4) backward_range<2, kLevels>(grad, codes, levels, out, n, begin, end);
  if (count == 8) backward_range<3, kLevels>(grad, codes, levels, out, n, begin, end);
  if (count == 16) backward_range<4, kLevels>(grad, codes, levels, out, n, begin, end);
}

#define MT_ENCODE(name, T)                                                                     \
  MT_CLONES void name(const T* x, const float* boundaries, uint8_t* out, int64_t n,            \
                      int64_t count, int64_t even, int64_t begin, int64_t end) {               \
    encode_any(x, boundaries, out, n, count, even, begin, end);                                \
  }
#define MT_BACKWARD(name, T, levels_only)                                                      \
  MT_CLONES void name(const T* grad, const uint8_t* codes, const float* levels, T* out,        \
                      int64_t n, int64_t count, int64_t begin, int64_t end) {                  \
    backward_any<levels_only>(grad, codes, levels, out, n, count, begin, end);                 \
  }

MT_ENCODE(encode_f32, float)
MT_ENCODE(encode_bf16, Bf16)
MT_BACKWARD(backward_f32, float, false)
MT_BACKWARD(backward_bf16, Bf16, false)
MT_BACKWARD(backward_f64, double, false)
MT_BACKWARD(decode_f32, float, true)

template <typename Body>
void over_blocks(int64_t n, int64_t threads, const Body& body) {
  parallel_for((n + kBlock - 1) / kBlock, kGrain, threads, body);
}

}  // namespace
}  // namespace memtrain

MT_EXPORT void mt_derivative_encode_f32(const float* x, const float* boundaries, uint8_t* codes,
                                        int64_t n, int64_t count, int64_t even, int64_t threads) {
  memtrain::over_blocks(n, threads, [=](int64_t begin, int64_t end) {
    memtrain::encode_f32(x, boundaries, codes, n, count, even, begin, end);
  });
}

MT_EXPORT void mt_derivative_encode_bf16(const void* x, const float* boundaries, uint8_t* codes,
                                         int64_t n, int64_t count, int64_t even,
                                         int64_t threads) {
  memtrain::over_blocks(n, threads, [=](int64_t begin, int64_t end) {
    memtrain::encode_bf16(static_cast<const memtrain::Bf16*>(x), boundaries, codes, n, count, even,
                          begin, end);
  });
}

MT_EXPORT void mt_derivative_backward_f32(const float* grad, const uint8_t* codes,
                                          const float* levels, float* out, int64_t n,
                                          int64_t count, int64_t threads) {
  memtrain::over_blocks(n, threads, [=](int64_t begin, int64_t end) {
    memtrain::backward_f32(grad, codes, levels, out, n, count, begin, end);
  });
}

MT_EXPORT void mt_derivative_backward_bf16(const void* grad, const uint8_t* codes,
                                           const float* levels, void* out, int64_t n,
                                           int64_t count, int64_t threads) {
  memtrain::over_blocks(n, threads, [=](int64_t begin, int64_t end) {
    memtrain::backward_bf16(static_cast<const memtrain::Bf16*>(grad), codes, levels,
                            static_cast<memtrain::Bf16*>(out), n, count, begin, end);
  });
}

MT_EXPORT void mt_derivative_backward_f64(const double* grad, const uint8_t* codes,
                                          const float* levels, double* out, int64_t n,
                                          int64_t count, int64_t threads) {
  memtrain::over_blocks(n, threads, [=](int64_t begin, int64_t end) {
    memtrain::backward_f64(grad, codes, levels, out, n, count, begin, end);
  });
}

MT_EXPORT void mt_derivative_decode(const uint8_t* codes, const float* levels, float* out,
                                    int64_t n, int64_t count, int64_t threads) {
  memtrain::over_blocks(n, threads, [=](int64_t begin, int64_t end) {
    memtrain::decode_f32(nullptr, codes, levels, out, n, count, begin, end);
  });
}

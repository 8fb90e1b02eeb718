// Weights of a step as float32 runs: as they are, or with the masters that split.py keeps.
#pragma once

#include "floats/runs.h"
#include "random/draws.h"

namespace memtrain {

constexpr uint32_t kInf = 0x7F800000u, kMagnitude = 0x7FFFFFFFu;

// How the master of a weight is kept; the order is that of `MasterWeight.fields` in kernels/step/split.py.
struct MasterWeight {
  void* correction;  // int8 or int16, or null
  int64_t kept;      // its bits
  int64_t stochastic, seed;
  bool any() const { return correction != nullptr || stochastic; }
};

// `draw`: the 16 random bits of stochastic rounding, added in place of half an ulp.
template <int KEPT, bool STOCHASTIC>
MT_INLINE uint32_t round_magnitude(uint32_t magnitude, uint32_t draw) {
  constexpr int kLost = 16 - KEPT;
  if constexpr (STOCHASTIC) return (magnitude + draw) >> kLost;
  if constexpr (kLost == 0) return magnitude;
  constexpr uint32_t kHalf = kLost ? (1u << (kLost - (kLost > 0))) - 1 : 0;
  return (magnitude + kHalf + ((magnitude >> kLost) & 1)) >> kLost;
}

template <typename Correction, int KEPT, bool STOCHASTIC>
MT_INLINE void split_one(uint32_t bits, uint32_t draw, uint16_t* weight, Correction* correction) {
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t rounded = round_magnitude<KEPT, STOCHASTIC>(magnitude, draw);
  uint32_t upper = (rounded + ((1u << KEPT) >> 1)) >> KEPT;
  const bool nan = magnitude > kInf;
  if constexpr (KEPT > 0) {
    const uint32_t difference = rounded - (upper << KEPT);
    *correction = static_cast<Correction>(nan ? 0u : difference);
  }
  upper = nan ? 0x7FC0u : upper;
  *weight = static_cast<uint16_t>((bits >> 16 & 0x8000u) | upper);
}

// The distance of float16 numbers at `half`; 1 where it is Inf or NaN.
MT_INLINE float ulp_of(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31u;
  return exponent == 31u ? 1.0f : float_of(((exponent > 1u ? exponent : 1u) + 102u) << 23);
}

template <typename Correction, int KEPT>
MT_INLINE void read_split(const uint16_t* __restrict weight, const Correction* __restrict correction,
                          bool half, int64_t n, float* __restrict out) {
  constexpr float kUnit = 1.0f / (1 << KEPT);
  if (half)
    for (int64_t i = 0; i < n; ++i)
      out[i] = from_half(weight[i]) +
               static_cast<float>(correction[i]) * (ulp_of(weight[i]) * kUnit);
  else
    for (int64_t i = 0; i < n; ++i)
      out[i] = float_of((static_cast<uint32_t>(weight[i]) << 16) +
                        (static_cast<uint32_t>(static_cast<int32_t>(correction[i])) << (16 - KEPT)));
}

template <typename Correction, int KEPT>
MT_INLINE void write_split(uint16_t* __restrict weight, Correction* __restrict correction, bool half,
                           int64_t n, const float* __restrict in) {
  constexpr float kMost = (1 << (KEPT - 1)) - 1, kLeast = -kMost - 1;
  if (!half) {
    for (int64_t i = 0; i < n; ++i)
      split_one<Correction, KEPT, false>(bits_of(in[i]), 0, weight + i, correction + i);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t rounded = to_half(in[i]);
    const bool finite = (rounded & 0x7C00u) != 0x7C00u;
    const float lost = finite ? in[i] - from_half(rounded) : 0.0f;
    const float units = __builtin_rintf(lost * ((1 << KEPT) / ulp_of(rounded)));
    const float held = units > kMost ? kMost : units < kLeast ? kLeast : units;
    correction[i] = static_cast<Correction>(held);
    weight[i] = rounded;
  }
}

[[maybe_unused]] MT_CLONES static void read_weights(const void* x, int64_t type, const MasterWeight& master, int64_t from,
                                   int64_t n, float* out) {
  const uint16_t* weight = static_cast<const uint16_t*>(x) + from;
  if (master.kept == 8)
    read_split<int8_t, 8>(weight, static_cast<int8_t*>(master.correction) + from, type == kFloat16,
                          n, out);
  else if (master.kept == 16)
    read_split<int16_t, 16>(weight, static_cast<int16_t*>(master.correction) + from,
                            type == kFloat16, n, out);
  else
    read_floats(x, type, from, n, out);
}

// The random bits of a run of kDrawn elements, made once.
struct Draws {
  int64_t block = -1;
  uint16_t bits[kDrawn];
};

// A run that crosses no multiple of kDrawn.
[[maybe_unused]] MT_CLONES static void write_weights(void* x, int64_t type, const MasterWeight& master, int64_t from,
                                    int64_t n, const float* in, Draws& draws) {
  uint16_t* weight = static_cast<uint16_t*>(x) + from;
  if (master.stochastic) {
    if (draws.block != from / kDrawn)
      draw_block(draws.block = from / kDrawn, static_cast<uint64_t>(master.seed), draws.bits);
    const uint16_t* draw = draws.bits + from % kDrawn;
    for (int64_t i = 0; i < n; ++i)
      split_one<int8_t, 0, true>(bits_of(in[i]), draw[i], weight + i, nullptr);
  } else if (master.kept == 8) {
    write_split<int8_t, 8>(weight, static_cast<int8_t*>(master.correction) + from,
                           type == kFloat16, n, in);
  } else if (master.kept == 16) {
    write_split<int16_t, 16>(weight, static_cast<int16_t*>(master.correction) + from,
                             type == kFloat16, n, in);
  } else {
    write_floats(x, type, from, n, in);
  }
}

}  // namespace memtrain

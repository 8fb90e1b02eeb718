// The update of any rule with states in blocks or exact, and of AdamW over a rank-1 or factored
// second moment (contract: kernels/step/step.py).
#ifndef MT_LANES
#define MT_SELF "step/blocks.cpp"
#include "step/table.h"
#include "foreach_isa.h"

namespace memtrain {

void update_blocks(const StepTask& t, int64_t begin, int64_t end) {
  MT_DISPATCH(update_rule(t, begin, end));
}

}  // namespace memtrain

#else

#include "step/lines.h"
#include "step/rules.h"
#include "step/dynamic.h"
#include "step/shortcuts.h"

// One state's numbers of a block as floats, and back: exact ones, or codes of 4 or 8 bits.
template <int kBits, bool kFirst>
struct Keeper {
  static constexpr int64_t kBlock = 128;
  const State& s;
  MT_MEMBER explicit Keeper(const State& state) : s(state) {}
  MT_MEMBER float* at(int64_t b) const { return static_cast<float*>(s.data) + b * kBlock; }
  MT_MEMBER void read(int64_t b, int64_t n, float, float* x) const { std::memcpy(x, at(b), n * 4); }
  MT_MEMBER void write(int64_t b, int64_t n, const float* x, float) const { std::memcpy(at(b), x, n * 4); }
};

template <bool kFirst>
struct Keeper<4, kFirst> {
  static constexpr int64_t kBlock = 128;
  const State& s;
  F values;
  Shortcut<kFirst> shortcut;
  MT_MEMBER explicit Keeper(const State& state) : s(state), values(load(state.codebook)), shortcut(state.codebook) {}
  MT_MEMBER uint8_t* at(int64_t b) const { return static_cast<uint8_t*>(s.data) + b * 64; }
  MT_MEMBER void read(int64_t b, int64_t, float scale, float* x) const {
    const F size = splat(scale);
    MT_UNROLL(4)
    for (int64_t i = 0; i < 64; i += 16) {
      const I byte = widen(at(b) + i);
      store(x + i, decode(values, byte) * size);
      store(x + i + 64, decode(values, byte >> 4) * size);
    }
  }
  MT_MEMBER void write(int64_t b, int64_t, const float* x, float scale) const {
    if (__builtin_expect(shortcut.write(x, scale, at(b)), 1)) return;
    const Codebook book = scaled(s.codebook, __builtin_fabsf(scale));
    const I sign = sign_bits(scale);
    MT_UNROLL(4)
    for (int64_t i = 0; i < 64; i += 16)
      narrow(at(b) + i, encode(book, flipped(load(x + i), sign)) | encode(book, flipped(load(x + 64 + i), sign)) << 4);
  }
  // Rounded by `drawn`.
  MT_MEMBER void write(int64_t b, const float* x, const float* u, float scale) const {
    const DrawnMap map = drawn_map(s.codebook, __builtin_fabsf(scale));
    const I sign = sign_bits(scale);
    MT_UNROLL(4)
    for (int64_t i = 0; i < 64; i += 16)
      narrow(at(b) + i, encode_drawn(map, flipped(load(x + i), sign), load(u + i)) |
                            encode_drawn(map, flipped(load(x + 64 + i), sign), load(u + 64 + i)) << 4);
  }
};

template <bool kFirst>
struct Keeper<8, kFirst> {
  static constexpr int64_t kBlock = 256;
  const State& s;
  Dynamic map;
  MT_MEMBER explicit Keeper(const State& state) : s(state), map(dynamic_of<kFirst>(state.codebook, state.buckets)) {}
  MT_MEMBER uint8_t* at(int64_t b) const { return static_cast<uint8_t*>(s.data) + b * 256; }
  MT_MEMBER void read(int64_t b, int64_t, float scale, float* x) const {
    for (int64_t i = 0; i < 256; i += 64) decode8<kFirst>(map, at(b) + i, splat(scale), x + i);
  }
  MT_MEMBER void write(int64_t b, int64_t, const float* x, float scale) const {
    const I sign = sign_bits(scale);
    scale = __builtin_fabsf(scale);
    // Nothing is above a bound times 0 or NaN, and a scale of Inf counts as NaN.
    if (!(scale > 0.0f && scale <= 0x1.fffffep127f)) std::memset(at(b), 0, 256);
    else if (scale < 0x1p-90f || scale > 0x1p90f) count(b, x, sign, scale);
    else
      for (int64_t i = 0; i < 256; i += 64)
        encode8<kFirst>(map, x + i, sign, splat(scale), splat(1.0f / scale), at(b) + i);
  }
  // Of a scale too far from 1 to divide by: bounds counted one by one.
  inline void count(int64_t b, const float* x, I sign, float scale) const {
    for (int64_t i = 0; i < 256; i += 16) {
      const F value = flipped(load(x + i), sign);
      I found = {};
      MT_UNROLL(1)
      for (int64_t k = 256; k < 511; ++k) found = found - (value > splat(s.codebook[k] * scale));
      narrow(at(b) + i, found);
    }
  }
};

// kDraws: `drawn` rounds the first state. Without states (0 bits) `held` stays zero.
template <typename Rule, int kBits, bool kDraws, int kSecond>
inline void update(const StepTask& t, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = Keeper<kBits, true>::kBlock;
  constexpr bool kTwo = Rule::kStates == 2 && kSecond != kFactored;  // whether the second has codes
  const Scalars h = splat_all(t.scalars);
  const I lane = lane_numbers();
  const Keeper<kBits, true> first(t.state[0]);
  const Keeper<kTwo ? kBits : 32, false> second(t.state[1]);
  alignas(64) float g_part[kBlock] = {}, p_part[kBlock] = {}, held[2][kBlock] = {}, u[kBlock];
  Lines<kBlock> old(t, begin), inverse(t, begin);
  Draws draws;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * kBlock, n = std::min<int64_t>(kBlock, t.n - from);
    const bool buffered = n < kBlock || !t.direct();
    const float* g = buffered ? g_part : t.g + from;
    float* p = buffered ? p_part : t.p + from;
    if (buffered) {
      read_floats(t.g, t.g_type, from, n, g_part);
      read_weights(t.p, t.p_type, t.master, from, n, p_part);
    }
    if (kBits > 0) first.read(b, n, kBits < 32 ? t.state[0].scale[b] : 0.0f, held[0]);
    if (kTwo) second.read(b, n, kBits == 32 ? 0.0f : kSecond == kRank1 ? 1.0f : t.state[1].scale[b], held[1]);
    if (kSecond == kRank1) old.find(t.state[1].scale, t.col_old), inverse.find(t.row_inv, t.col_inv);
    if (kSecond == kFactored) old.find(t.ratio, t.state[1].scale);
    Extremes top = {};
    I second_top = {};
    MT_UNROLL(2)
    for (int64_t at = 0; at < kBlock; at += 16) {
      if (!buffered) __builtin_prefetch(g + at + 512), __builtin_prefetch(p + at + 512, 1);
      const F weight = load(p + at), grad = gradient(h, g + at, p + at);
      F x[2] = {load(held[0] + at), load(held[1] + at)};
      if constexpr (kSecond == kFactored) {
        x[0] = Rule::first(h, grad, x[0]), x[1] = old.row_at(at) * load(old.col + at);
        store(p + at, Rule::parameter(h, weight, x[0], x[1]));
      } else {
        if (kSecond == kRank1) x[1] = x[1] * least(old.row_at(at), load(old.col + at));
        store(p + at, Rule::update(h, weight, grad, x));
      }
      F share = kDraws ? drawn(x[0], weight) : F{};
      if (n < kBlock) {  // what lies past the end is zero, as the reference pads
        const I inside = lane + static_cast<int32_t>(at) < static_cast<int32_t>(n);
        x[0] = (F)((I)x[0] & inside), x[1] = (F)((I)x[1] & inside), share = (F)((I)share & inside);
      }
      extend(top, x[0]);
      if (kTwo && kSecond == kAsFirst) second_top = imax(second_top, magnitude(x[1]));
      if (kSecond == kRank1)
        x[1] = x[1] * (F)imax((I)inverse.row_at(at), (I)load(inverse.col + at));
      if (kBits > 0) store(held[0] + at, x[0]);
      if (kTwo) store(held[1] + at, x[1]);
      if (kDraws) store(u + at, share);
    }
    if (buffered) write_weights(t.p, t.p_type, t.master, from, n, p_part, draws);
    if (kBits == 0) continue;
    const float scale = kBits == 32 ? 0.0f : largest(top, held[0], kBlock);
    if (kBits < 32) t.state[0].scale[b] = scale;
    if constexpr (kDraws) first.write(b, held[0], u, scale);
    else first.write(b, n, held[0], scale);
    if (!kTwo) continue;
    const float size = kSecond == kRank1 ? 1.0f : as_float(top_of(second_top));
    if (kBits < 32 && kSecond == kAsFirst) t.state[1].scale[b] = size;
    second.write(b, n, held[1], size);
  }
}

template <typename Rule, int kSecond>
inline void update_bits(const StepTask& t, int64_t begin, int64_t end) {
  if (t.bits == 4) t.draws ? update<Rule, 4, true, kSecond>(t, begin, end) : update<Rule, 4, false, kSecond>(t, begin, end);
  if constexpr (kSecond != kRank1)
    if (t.bits == 8) update<Rule, 8, false, kSecond>(t, begin, end);
  if constexpr (kSecond == kAsFirst) {
    if (t.bits == 32) update<Rule, 32, false, kSecond>(t, begin, end);
    if constexpr (Rule::kStates == 1)  // SGD without momentum
      if (t.bits == 0) update<Rule, 0, false, kSecond>(t, begin, end);
  }
}

inline void update_rule(const StepTask& t, int64_t begin, int64_t end) {
  if (t.second == kRank1) return update_bits<AdamW, kRank1>(t, begin, end);
  if (t.second == kFactored) return update_bits<AdamW, kFactored>(t, begin, end);
#define MT_RUN(number, Rule) if (t.rule == number) update_bits<Rule, kAsFirst>(t, begin, end);
  MT_EACH_RULE(MT_RUN)
#undef MT_RUN
}

#endif

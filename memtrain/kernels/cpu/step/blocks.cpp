// Any rule with states in blocks, or exact; AdamW in 8 bits also over a factored second moment
// (contract: kernels/step/step.py).
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

#include "step/rules.h"
#include "step/dynamic.h"

// The 8-bit codes of a block whose scale is too far from 1 to divide by: bounds counted one by one.
inline void count8(const State& s, const float* x, I sign, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < 256; i += 16) {
    const F value = flipped(load(x + i), sign);
    I count = {};
    MT_UNROLL(1)
    for (int64_t k = 256; k < 511; ++k) count = count - (value > splat(s.codebook[k] * scale));
    narrow(codes + i, count);
  }
}

// The block's part of a state, as floats.
template <int kBits>
inline void fetch(const State& s, int64_t b, int64_t n, float* x) {
  if (kBits == 32) {
    std::memcpy(x, static_cast<const float*>(s.data) + b * 128, n * 4);
    return;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(s.data) + b * 64;
  const F scale = splat(s.scale[b]), values = load(s.codebook);
  for (int64_t i = 0; i < 64; i += 16) {
    const I byte = widen(codes + i);
    store(x + i, decode(values, byte) * scale);
    store(x + i + 64, decode(values, byte >> 4) * scale);
  }
}

// A block of 8 bits that has its new values, and waits for its codes.
struct Waiting {
  uint8_t* codes;
  I sign;
  F scale, inverse;
  bool usual;
};

// What no loop serves is done at once.
MT_HELPER Waiting wait_for(const State& s, int64_t b, const float* x, float scale) {
  uint8_t* codes = static_cast<uint8_t*>(s.data) + b * 256;
  s.scale[b] = scale;
  const I sign = sign_bits(scale);
  scale = __builtin_fabsf(scale);
  const bool usual = scale >= 0x1p-90f && scale <= 0x1p90f;
  // Nothing is above a bound times 0 or NaN, and a scale of Inf counts as NaN.
  if (!(scale > 0.0f && scale <= 0x1.fffffep127f)) std::memset(codes, 0, 256);
  else if (!usual) count8(s, x, sign, scale, codes);
  return {codes, sign, splat(scale), splat(1.0f / scale), usual};
}

// The maximum and x as magnitudes; x is never below zero, but NaN may have a sign, which is left to
// who reads the maximum.
MT_INLINE I highest(I top, F x) {
#ifdef MT_AVX512
  return (I)_mm512_max_epu32((__m512i)top, (__m512i)x);
#else
  return imax(top, magnitude(x));
#endif
}

struct Room {  // for a block that is not whole, or not float32; p for the block before as well
  float g[256], p[2][256];
};

// The second moments of the 256 elements from `from` on, as their factors give them.
inline void product(const StepTask& t, int64_t from, float* out) {
  const float *row = t.ratio, *col = t.state[1].scale;
  if (t.cols % 256 == 0) {
    const F ratio = splat(row[from / t.cols]);
    col += from % t.cols;
    for (int64_t i = 0; i < 256; i += 16) store(out + i, ratio * load(col + i));
    return;
  }
  alignas(64) float r[256], c[256];
  for (int64_t i = 0; i < 256; i += 128) gather(row, col, from + i, t.rows, t.cols, r + i, c + i);
  for (int64_t i = 0; i < 256; i += 16) store(out + i, load(r + i) * load(c + i));
}

// The codes of a block are made, and a rule's quotients taken, in the loop of the next one: neither
// waits for the other's roots and quotients, which take a third of the time.
template <typename Rule, bool kPlain, bool kFactors>
inline void update_bytes(const StepTask& t, int64_t begin, int64_t end) {
  constexpr bool kLate = Rule::kDivides;
  constexpr int kStates = kFactors ? 1 : Rule::kStates;  // that are codes
  const Scalars h = splat_all(t.scalars);
  const I lane = lane_numbers();
  const Dynamic first = dynamic_of<true>(t.state[0].codebook, t.state[0].buckets);
  Dynamic second{};
  if (kStates == 2) second = dynamic_of<false>(t.state[1].codebook, t.state[1].buckets);
  alignas(64) Room part = {};
  alignas(64) float squares[256];  // kFactors: the second moments
  Draws draws;
  alignas(64) float held[2][kStates + kLate][256] = {};  // the states, and the divisors
  Waiting waiting[2] = {};
  for (int64_t b = begin; b <= end; ++b) {
    float (*now)[256] = held[b & 1], (*then)[256] = held[~b & 1];
    const int64_t from = b * 256, n = std::min<int64_t>(256, t.n - from);
    const bool buffered = n < 256 || !t.direct();
    const float* g = buffered ? part.g : t.g + from;
    float* p = buffered ? part.p[b & 1] : t.p + from;
    // The block before is the last one, and in part, only after it.
    float* before = t.direct() && from <= t.n ? t.p + from - 256 : part.p[~b & 1];
    if (b < end && buffered) {
      read_floats(t.g, t.g_type, from, n, part.g);
      read_weights(t.p, t.p_type, t.master, from, n, p);
    }
    if (kFactors && b < end) product(t, from, squares);
    Extremes first_top = {};
    I second_top = {};
    MT_UNROLL(1)
    for (int64_t at = 0; at < 256; at += 64) {
      if (b < end) {
        __builtin_prefetch(static_cast<uint8_t*>(t.state[0].data) + from + at + 512, 1);
        if (kStates == 2) __builtin_prefetch(static_cast<uint8_t*>(t.state[1].data) + from + at + 512, 1);
        decode8<true>(first, static_cast<uint8_t*>(t.state[0].data) + from + at, splat(t.state[0].scale[b]), now[0] + at);
        if (kStates == 2) decode8<false>(second, static_cast<uint8_t*>(t.state[1].data) + from + at, splat(t.state[1].scale[b]), now[1] + at);
        MT_UNROLL(4)
        for (int64_t i = at; i < at + 64; i += 16) {
          if (!buffered) __builtin_prefetch(g + i + 512), __builtin_prefetch(p + i + 512, 1);
          F x[2] = {};
          const F old = load(p + i), grad = gradient<kPlain>(h, load(g + i), old);
          for (int k = 0; k < kStates; ++k) x[k] = load(now[k] + i);
          if constexpr (kLate) {
            x[0] = Rule::first(h, grad, x[0]);
            x[1] = kFactors ? load(squares + i) : Rule::second(h, grad, x[1]);
            store(now[kStates] + i, Rule::divisor(h, x[1]));
          } else {
            store(p + i, Rule::update(h, old, grad, x));
          }
          for (int k = 0; k < kStates; ++k) {
            if (n < 256) {  // what lies past the end is zero, as the reference pads
              const I inside = lane + static_cast<int32_t>(i) < static_cast<int32_t>(n);
              x[k] = (F)((I)x[k] & inside);
            }
            if (k == 0) extend(first_top, x[k]);
            else second_top = highest(second_top, x[k]);
            store(now[k] + i, x[k]);
          }
        }
      }
      if constexpr (kLate) {
        if (b > begin) {
          MT_UNROLL(4)
          for (int64_t i = at; i < at + 64; i += 16)
            store(before + i, Rule::divide(h, load(before + i), load(then[0] + i), load(then[kStates] + i)));
        }
      }
      if (waiting[0].usual) encode8<true>(first, then[0] + at, waiting[0].sign, waiting[0].scale, waiting[0].inverse, waiting[0].codes + at);
      if (kStates == 2 && waiting[1].usual) encode8<false>(second, then[1] + at, I{}, waiting[1].scale, waiting[1].inverse, waiting[1].codes + at);
    }
    if (kLate && b > begin && before == part.p[~b & 1])
      write_weights(t.p, t.p_type, t.master, from - 256, std::min<int64_t>(256, t.n - from + 256), before, draws);
    if (b == end) break;
    if (!kLate && buffered) write_weights(t.p, t.p_type, t.master, from, n, p, draws);
    waiting[0] = wait_for(t.state[0], b, now[0], largest(first_top, now[0], 256));
    if (kStates == 2) waiting[1] = wait_for(t.state[1], b, now[1], as_float(top_of(second_top & 0x7fffffff)));
  }
}

template <int kBits, bool kDraws>
inline void keep(const State& s, int64_t b, int64_t n, const float* x, const float* u, float scale) {
  if (kBits == 32) {
    std::memcpy(static_cast<float*>(s.data) + b * 128, x, n * 4);
    return;
  }
  uint8_t* codes = static_cast<uint8_t*>(s.data) + b * 64;
  s.scale[b] = scale;
  const I sign = sign_bits(scale);
  scale = __builtin_fabsf(scale);
  if constexpr (kDraws) {
    const DrawnMap map = drawn_map(s.codebook, scale);
    MT_UNROLL(1)
    for (int64_t i = 0; i < 64; i += 16)
      narrow(codes + i, encode_drawn(map, flipped(load(x + i), sign), load(u + i)) |
                            encode_drawn(map, flipped(load(x + 64 + i), sign), load(u + 64 + i)) << 4);
    return;
  }
  const Codebook book = scaled(s.codebook, scale);
  MT_UNROLL(1)
  for (int64_t i = 0; i < 64; i += 16)
    narrow(codes + i, encode(book, flipped(load(x + i), sign)) | encode(book, flipped(load(x + 64 + i), sign)) << 4);
}

// States of 4 or 32 bits, or none: held stays zero. kDraws: a state is rounded by `drawn`.
template <typename Rule, int kBits, bool kDraws>
inline void update_128(const StepTask& t, int64_t begin, int64_t end) {
  constexpr int kStates = Rule::kStates;
  const Scalars h = splat_all(t.scalars);
  const I lane = lane_numbers();
  float g_part[128] = {}, p_part[128] = {}, held[kStates][128] = {}, u[128];
  Draws draws;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const bool buffered = n < 128 || !t.direct();
    const float* g = t.g + from;
    float* p = t.p + from;
    if (buffered) {
      read_floats(t.g, t.g_type, from, n, g_part);
      read_weights(t.p, t.p_type, t.master, from, n, p_part);
      g = g_part, p = p_part;
    }
    for (int k = 0; kBits > 0 && k < kStates; ++k) fetch<kBits>(t.state[k], b, n, held[k]);
    Extremes top[kStates] = {};
    MT_UNROLL(1)
    for (int64_t at = 0; at < 128; at += 16) {
      if (!buffered) __builtin_prefetch(g + at + 256), __builtin_prefetch(p + at + 256);
      const F old = load(p + at), grad = gradient<false>(h, load(g + at), old);
      F x[kStates];
      for (int k = 0; k < kStates; ++k) x[k] = load(held[k] + at);
      store(p + at, Rule::update(h, old, grad, x));
      F share = kDraws ? drawn(x[0], old) : F{};
      for (int k = 0; k < kStates; ++k) {
        if (n < 128) {  // what lies past the end is zero, as the reference pads
          const I inside = lane + static_cast<int32_t>(at) < static_cast<int32_t>(n);
          x[k] = (F)((I)x[k] & inside);
          if (kDraws) share = (F)((I)share & inside);
        }
        extend(top[k], x[k]);
        if (kDraws) store(u + at, share);
        if (kBits > 0) store(held[k] + at, x[k]);
      }
    }
    if (buffered) write_weights(t.p, t.p_type, t.master, from, n, p_part, draws);
    for (int k = 0; kBits > 0 && k < kStates; ++k)
      keep<kBits, kDraws>(t.state[k], b, n, held[k], u, kBits == 32 ? 0.0f : largest(top[k], held[k], 128));
  }
}

template <typename Rule, bool kFactors>
inline void update_8(const StepTask& t, int64_t begin, int64_t end) {
  is_plain(t) ? update_bytes<Rule, true, kFactors>(t, begin, end)
              : update_bytes<Rule, false, kFactors>(t, begin, end);
}

template <typename Rule>
inline void update_bits(const StepTask& t, int64_t begin, int64_t end) {
  if constexpr (Rule::kStates == 2)
    if (t.bits == 8 && t.second == kFactored) return update_8<Rule, true>(t, begin, end);
  if (t.bits == 8) update_8<Rule, false>(t, begin, end);
  if constexpr (Rule::kStates == 1)  // two: adamw4.h
    if (t.bits == 4) t.draws ? update_128<Rule, 4, true>(t, begin, end) : update_128<Rule, 4, false>(t, begin, end);
  if (t.bits == 32) update_128<Rule, 32, false>(t, begin, end);
  if constexpr (Rule::kStates == 1)  // SGD without momentum
    if (t.bits == 0) update_128<Rule, 0, false>(t, begin, end);
}

inline void update_rule(const StepTask& t, int64_t begin, int64_t end) {
#define MT_RUN(number, Rule) if (t.rule == number) update_bits<Rule>(t, begin, end);
  MT_EACH_RULE(MT_RUN)
#undef MT_RUN
}

#endif

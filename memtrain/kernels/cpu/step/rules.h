// The rules of the fused step in lanes; kernels/step/update_rules.py has their formulas. Included
// per instruction set, so it has no include guard. A new rule is one struct here, and its place in
// MT_EACH_RULE.

struct Scalars {  // in the order of the rule's tuple in update_rules.py
  F decay, l2, sign, a, b, c, d, e;
  bool has_l2, has_c;
};

MT_INLINE Scalars splat_all(const float* x) {
  return {splat(x[0]), splat(x[1]), splat(x[2]), splat(x[3]),  splat(x[4]),
          splat(x[5]), splat(x[6]), splat(x[7]), x[1] != 0.0f, x[5] != 0.0f};
}

// The gradient as a rule sees it; the weight is read for L2 decay only.
MT_INLINE F gradient(const Scalars& s, const float* from, const float* weight) {
  F g = load(from) * s.sign;
  if (__builtin_expect(s.has_l2, 0)) g = g + s.l2 * load(weight);
  return g;
}

// Each rule updates its states x in place, and gives the new parameter.
struct AdamW {
  static constexpr int kStates = 2;
  static MT_MEMBER F first(const Scalars& s, F g, F m) { return m + s.a * (g - m); }
  static MT_MEMBER F second(const Scalars& s, F g, F v) { return s.b * v + (s.c * g) * g; }
  static MT_MEMBER F parameter(const Scalars& s, F p, F m, F v) {
    return p * s.decay - (s.d * m) / (root(v) + s.e);
  }
  static MT_MEMBER F update(const Scalars& s, F p, F g, F* x) {
    x[0] = first(s, g, x[0]), x[1] = second(s, g, x[1]);
    return parameter(s, p, x[0], x[1]);
  }
};

struct Sgd {
  static constexpr int kStates = 1;
  static MT_MEMBER F update(const Scalars& s, F p, F g, F* x) {
    x[0] = s.a * x[0] + s.b * g;
    return p - s.d * (s.has_c ? g + s.c * x[0] : x[0]);
  }
};

// `drawn` of update_rules.py.
MT_INLINE F drawn(F m, F p) {
  const auto times = [](I x, uint32_t odd) __attribute__((always_inline)) { return x * (I{} + static_cast<int32_t>(odd)); };
  I h = times(magnitude(m) ^ (((I)p >> 16) & 0x7FFF), 0x7FEB352Du);
  h = times(h ^ ((h >> 15) & 0x1FFFF), 0x846CA68Bu);
  return (F)(((h >> 9) & 0x7FFF80) | (I{} + 0x3F800040)) - splat(1.0f);  // (r + 0.5) / 65536, above 1
}

// A 4-bit codebook for rounding by `drawn`; the bounds of `lower` are the values from the second on.
struct DrawnMap {
  Codebook lower;
  F gaps, scale;
};

MT_INLINE DrawnMap drawn_map(const float* table, float scale) {
  const F size = splat(scale + (scale - scale));  // Inf becomes NaN: no bound is passed
  const F values = load(table), following = load(table + 1);  // the last lane is never a gap
  return {with_bounds(values, following * size), following - values, size};
}

// The codes of 16 values, rounded up or down by comparison with `u`.
MT_INLINE I encode_drawn(const DrawnMap& map, F x, F u) {
  const I low = encode(map.lower, x);
  return low - (x > (decode(map.lower.values, low) + u * decode(map.gaps, low)) * map.scale);  // true is -1
}

struct Lion {
  static constexpr int kStates = 1;
  static MT_MEMBER F update(const Scalars& s, F p, F g, F* x) {
    const F c = s.a * x[0] + s.b * g, zero = {};
    const F step = select(c > zero, splat(1.0f), select(c < zero, splat(-1.0f), c));  // NaN stays NaN
    x[0] = s.c * x[0] + s.d * g;
    return p * s.decay - s.e * step;
  }
};

#define MT_EACH_RULE(RUN) RUN(kAdamW, AdamW) RUN(kSgd, Sgd) RUN(kLion, Lion)

// AdamW with its first moment in 2 bits over the roots of a factored second one (definitions:
// kernels/codebook/lloyd_max.py, and `update_with_residual` of kernels/step/update_rules.py).
// reduce.h includes it.

constexpr float kSmall = 0.4528f, kLarge = 1.51f;
constexpr float kBound = static_cast<float>((0.4528 + 1.51) / 2 * ((0.4528 + 1.51) / 2));

// Rows and columns of the moment that is kept; they lie where other codecs have tables.
MT_INLINE float* old_rows(const StepTask& t) { return const_cast<float*>(t.state[0].codebook); }
MT_INLINE float* old_columns(const StepTask& t) {
  return reinterpret_cast<float*>(const_cast<uint8_t*>(t.state[0].buckets));
}

// Between the passes: roots of the new factors, and their reciprocals.
inline void take_roots(StepTask& t) {
  for (int64_t i = 0; i < t.rows; ++i) t.ratio[i] = __builtin_sqrtf(t.ratio[i]);
  for (int64_t j = 0; j < t.cols; ++j) t.col_next[j] = __builtin_sqrtf(finite(t.state[1].scale[j]));
  invert(t.ratio, t.row_inv, t.rows);
  invert(t.col_next, t.col_inv, t.cols);
}

// The sum of the lanes, by halves.
template <typename T, typename Lanes>
MT_INLINE T sum_of(Lanes all) {
  typedef T Eight __attribute__((vector_size(32)));
  typedef T Four __attribute__((vector_size(16)));
  Eight e[2], eight;
  Four f[2], four;
  __builtin_memcpy(e, &all, sizeof e);
  eight = e[0] + e[1];
  __builtin_memcpy(f, &eight, sizeof f);
  four = f[0] + f[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// A bfloat16 scale, rounded towards 0; 0 where there is none.
MT_INLINE uint16_t upper_half(float scale) {
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, 4);
  return (bits & 0x7F800000u) == 0x7F800000u ? 0 : static_cast<uint16_t>(bits >> 16);
}

inline void update_adamw2(const StepTask& t, int64_t begin, int64_t end) {
  const Scalars s = splat_all(t.scalars);
  const F residual = splat(t.scalars[8]), small = splat(kSmall), large = splat(kLarge);
  const float table[16] = {-kLarge, -kSmall, kSmall, kLarge, -kLarge, -kSmall, kSmall, kLarge,
                           -kLarge, -kSmall, kSmall, kLarge, -kLarge, -kSmall, kSmall, kLarge};
  const I lane = lane_numbers();
  uint8_t* all_codes = static_cast<uint8_t*>(t.state[0].data);
  uint16_t* scales = reinterpret_cast<uint16_t*>(t.state[0].scale);
  alignas(64) float g_tail[128] = {}, p_tail[128] = {}, first[128], root[128], over[128];
  Lines<128> old(t, begin), now(t, begin), inverse(t, begin);
  Draws draws;

  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const bool buffered = n < 128 || !t.direct();
    const float* g = buffered ? g_tail : t.g + from;
    float* p = buffered ? p_tail : t.p + from;
    uint8_t* codes = all_codes + b * 32;
    if (buffered) {
      read_floats(t.g, t.g_type, from, n, g_tail);
      read_weights(t.p, t.p_type, t.master, from, n, p_tail);
    } else {
      fetch(t.g + from), fetch(t.p + from);
    }
    old.find(old_rows(t), old_columns(t));
    now.find(t.ratio, t.col_next);
    inverse.find(t.row_inv, t.col_inv);
    const F values = load(table) * splat(from_bfloat(scales[b]));

    // The new moment, as it is and over its root; its mean square decides which elements are large.
    F squares[2] = {}, sizes[2] = {};
    MT_UNROLL(2)
    for (int k = 0; k < 2; ++k) {
      const I byte = widen(codes + 16 * k);
      MT_UNROLL(4)
      for (int q = 0; q < 4; ++q) {
        const int at = 32 * q + 16 * k;
        const F before = decode_two_bits(values, byte >> (2 * q)) * (old.row_at(at) * load(old.col + at));
        const F m = AdamW::first(s, gradient(s, g + at, p + at), before);
        F x = m * inverse.row_at(at) * load(inverse.col + at);
        if (n < 128) x = (F)((I)x & (lane + at < static_cast<int32_t>(n)));
        store(first + at, m), store(over + at, x), store(root + at, now.row_at(at) * load(now.col + at));
        squares[k] += x * x, sizes[k] += (F)magnitude(x);
      }
    }
    const F bound = splat(kBound * (sum_of<float>(squares[0] + squares[1]) / static_cast<float>(n)));

    // The scale of least squares.
    F large_sizes[2] = {};
    I truths = {};
    MT_UNROLL(2)
    for (int k = 0; k < 2; ++k) {
      MT_UNROLL(4)
      for (int at = 16 * k; at < 128; at += 32) {
        const F x = load(over + at);
        const I is_large = x * x > bound;
        large_sizes[k] += (F)(magnitude(x) & is_large);
        truths = truths + is_large;
      }
    }
    const int32_t count = -sum_of<int32_t>(truths);
    const float whole = static_cast<float>(1.51 * 1.51) * static_cast<float>(count) +
                        static_cast<float>(0.4528 * 0.4528) * static_cast<float>(n - count);
    const float length = kSmall * sum_of<float>(sizes[0] + sizes[1]) + static_cast<float>(1.51 - 0.4528) * sum_of<float>(large_sizes[0] + large_sizes[1]);
    scales[b] = upper_half(length / whole);
    const F scale = splat(from_bfloat(scales[b])), small_value = small * scale, large_value = large * scale;

    MT_UNROLL(2)
    for (int k = 0; k < 2; ++k) {
      I byte = {};
      MT_UNROLL(4)
      for (int q = 0; q < 4; ++q) {
        const int at = 32 * q + 16 * k;
        const F x = load(over + at), m = load(first + at), y = load(root + at);
        const I is_large = x * x > bound, minus = (I)x >> 31;
        // 2 or 3 above zero; below it all their bits change
        byte = byte | (((I{} - is_large) + 2) ^ (minus & 3)) << (2 * q);
        const F size = select(is_large, large_value, small_value);
        const F stored = (F)((I)size | ((I)x & INT32_MIN)) * y;
        const F step = s.d * m + residual * (m - stored);
        store(p + at, load(p + at) * s.decay - step / (y + s.e));
      }
      narrow(codes + 16 * k, byte);
    }
    if (buffered) write_weights(t.p, t.p_type, t.master, from, n, p_tail, draws);
  }
}

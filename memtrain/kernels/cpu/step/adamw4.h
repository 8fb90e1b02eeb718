// AdamW with its first moment in 4 bits, compiled once per instruction set by foreach_isa.h: loops
// of their own, since one pass decodes, updates and encodes both moments in registers.
#include "step/rules.h"
#include "step/reduce.h"
#include "step/nibbles.h"
#include "step/adamw2.h"

// Between the passes, one thread per tensor.
inline void finalize_scales(StepTask& t) {
  if (t.second == kRank1) {
    if (t.dims > 2) {
      collect(t);
      spread(t, t.next, t.col_next);
    }
    t.unit = unit_of(t.state[1].codebook, t.next, t.rows, unit_of(t.state[1].codebook, t.col_next, t.cols, kUnit));
    invert(t.next, t.unit, t.row_inv, t.rows);
    invert(t.col_next, t.unit, t.col_inv, t.cols);
  } else if (t.second == kFactored) {
    const int64_t chunks = (t.rows + t.chunk - 1) / t.chunk;
    bool overflowed = false;  // no element moves then
    for (int64_t j = 0; j < t.cols; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < chunks; ++k) sum += t.partial[k * t.cols + j];
      t.state[1].scale[j] = t.scalars[4] * t.state[1].scale[j] + t.scalars[5] * static_cast<float>(sum / t.rows);
      overflowed |= t.state[1].scale[j] > FLT_MAX;
    }
    const float* row = static_cast<const float*>(t.state[1].data);
    double sum = 0;
    for (int64_t i = 0; i < t.rows; ++i) sum += row[i];
    const float mean = static_cast<float>(sum / t.rows);
    overflowed |= mean > FLT_MAX;
    for (int64_t i = 0; i < t.rows; ++i)
      t.ratio[i] = overflowed ? FLT_MAX : mean == 0.0f ? 0.0f : finite(row[i] / mean);
    if (t.bits == 2) take_roots(t);
  }
}

// A block of 128 on its way: its new moments (the second as it is encoded) and what divides the
// step, while the next block's begin. One loop does the first half of a block and the second half
// of the one before: neither waits for the other's roots and quotients.
struct Block {
  alignas(64) float first[128], second[128], divisor[128], drawn[128];
};

// kApart: a last block that is not whole, or tensors that are not float32, go through buffers.
// kDraws: `drawn` rounds the first moment.
template <int kSecond, bool kDraws, bool kAligned, bool kPlain, bool kApart>
inline void update_pass(const StepTask& t, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const Scalars s = splat_all(t.scalars);
  const F m_values = load(t.state[0].codebook), v_values = kSecond == kFactored ? F{} : load(t.state[1].codebook);
  const SignedMap m_map = signed_map(t.state[0].codebook);
  const UnsignedMap v_map = kSecond == kFactored ? UnsignedMap{} : unsigned_map(t.state[1].codebook, t.unit);
  uint8_t *m_codes = static_cast<uint8_t*>(t.state[0].data), *v_codes = static_cast<uint8_t*>(t.state[1].data);
  const float* row_scale = kSecond == kFactored ? t.ratio : t.state[1].scale;
  const float* col_scale = kSecond == kFactored ? t.state[1].scale : t.col_old;
  const I lane = lane_numbers();
  alignas(64) float g_tail[128] = {}, p_tail[2][128] = {}, r[128], c[128], ri[128], ci[128];
  Block held[2] = {};
  SignedCoder m_coder = {};
  DrawnCoder drawn_coder = {};
  UnsignedCoder v_coder = {};
  Draws draws;
  Place place(begin, kAligned ? t.cols : 1);

  const auto start_codes = [&](int64_t b) __attribute__((always_inline)) {
    if (kDraws) start(drawn_coder, m_map.table, t.state[0].scale[b]);
    else start(m_coder, m_map, t.state[0].scale[b]);
    if (kSecond == kAsFirst) start(v_coder, v_map, t.state[1].scale[b]);
  };
  const auto second_half = [&](Block& block, float* p, int pair) __attribute__((always_inline)) {
    MT_UNROLL(2)
    for (int at = 32 * pair; at < 32 * pair + 32; at += 16) {
      const F divisor = load(block.divisor + at);
      store(p + at, AdamW::divide(s, load(p + at), load(block.first + at), divisor));
    }
    if (kDraws) take(drawn_coder, block.first, block.drawn, pair);
    else take(m_coder, block.first, pair);
    if (kSecond == kAsFirst) take_scaled(v_coder, block.second, pair);
    if (kSecond == kRank1) take_unit(v_coder, block.second, pair);
  };
  const auto finish_codes = [&](Block& block, int64_t b) __attribute__((always_inline)) {
    if (kDraws) finish(drawn_coder, m_codes + b * 64);
    else finish(m_coder, m_map, block.first, t.state[0].scale[b], m_codes + b * 64);
    if (kSecond == kAsFirst)
      finish_scaled(v_coder, v_map, block.second, t.state[1].scale[b], v_codes + b * 64);
    if (kSecond == kRank1) finish_unit(v_coder, v_map, block.second, v_codes + b * 64);
  };

  for (int64_t b = begin; b < end; ++b) {
    Block &now = held[b & 1], &then = held[~b & 1];
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const float *g = kApart ? g_tail : t.g + from, *p = kApart ? p_tail[b & 1] : t.p + from;
    float* before = kApart ? p_tail[~b & 1] : t.p + from - 128;
    F old_row = {}, inv_row = {};
    const float *cs = c, *cinv = ci;
    Extremes m_top = {};
    I v_top = {};
    if (kApart) {
      read_floats(t.g, t.g_type, from, n, g_tail);
      read_weights(t.p, t.p_type, t.master, from, n, p_tail[b & 1]);
    } else {
      fetch(t.g + from), fetch(t.p + from);
    }
    if (kSecond != kAsFirst && kAligned) {
      old_row = splat(row_scale[place.row]), cs = col_scale + place.col;
      if (kSecond == kRank1) inv_row = splat(t.row_inv[place.row]), cinv = t.col_inv + place.col;
      place.advance(t.cols);
    } else if (kSecond != kAsFirst) {
      gather(row_scale, col_scale, from, t.rows, t.cols, r, c);
      if (kSecond == kRank1) gather(t.row_inv, t.col_inv, from, t.rows, t.cols, ri, ci);
    }
    const F m_scale = splat(t.state[0].scale[b]), v_scale = kSecond == kAsFirst ? splat(t.state[1].scale[b]) : F{};
    if (b > begin) start_codes(b - 1);
    MT_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      const I m_byte = widen(m_codes + b * 64 + k * 16);
      const I v_byte = kSecond == kFactored ? I{} : widen(v_codes + b * 64 + k * 16);
      MT_UNROLL(2)
      for (int h = 0; h < 2; ++h) {
        const int at = h * 64 + k * 16;
        const F weight = load(p + at), grad = gradient<kPlain>(s, load(g + at), weight);
        const F old = decode(m_values, h ? m_byte >> 4 : m_byte) * m_scale;
        F first = AdamW::first(s, grad, old), square;
        const F row = kAligned ? old_row : kSecond == kAsFirst ? F{} : load(r + at);
        if (kSecond == kFactored) {
          square = row * load(cs + at);
        } else {
          const F scale = kSecond == kAsFirst ? v_scale : least(row, load(cs + at));
          square = AdamW::second(s, grad, decode(v_values, h ? v_byte >> 4 : v_byte) * scale);
        }
        store(now.divisor + at, AdamW::divisor(s, square));
        F u = kDraws ? drawn(first, weight) : F{};
        if (kApart) {  // what lies past the end is zero, as the reference pads
          const I inside = lane + at < static_cast<int32_t>(n);
          first = (F)((I)first & inside), square = (F)((I)square & inside);
          if (kDraws) u = (F)((I)u & inside);
        }
        extend(m_top, first);
        if (kSecond == kAsFirst) v_top = imax(v_top, magnitude(square));
        if (kSecond == kRank1)
          square = square * (F)imax((I)(kAligned ? inv_row : load(ri + at)), (I)load(cinv + at));
        store(now.first + at, first);
        if (kDraws) store(now.drawn + at, u);
        if (kSecond != kFactored) store(now.second + at, square);
      }
      if (b > begin) second_half(then, before, k);
    }
    if (b > begin) {
      finish_codes(then, b - 1);
      if (kApart) write_weights(t.p, t.p_type, t.master, from - 128, 128, before, draws);
    }
    t.state[0].scale[b] = largest(m_top, now.first, 128);
    if (kSecond == kAsFirst) t.state[1].scale[b] = as_float(top_of(v_top));
  }

  const int64_t last = end - 1, n = std::min<int64_t>(128, t.n - last * 128);
  float* p = kApart ? p_tail[last & 1] : t.p + last * 128;
  start_codes(last);
  MT_UNROLL(4)
  for (int k = 0; k < 4; ++k) second_half(held[last & 1], p, k);
  finish_codes(held[last & 1], last);
  if (kApart) write_weights(t.p, t.p_type, t.master, last * 128, n, p, draws);
}

template <int kSecond, bool kDraws, bool kAligned, bool kPlain>
inline void update_all(const StepTask& t, int64_t begin, int64_t end) {
  const int64_t whole = t.direct() ? std::min(end, t.n / 128) : begin;
  update_pass<kSecond, kDraws, kAligned, kPlain, false>(t, begin, whole);
  if (whole < end) update_pass<kSecond, kDraws, kAligned, kPlain, true>(t, whole, end);
}

template <bool kDraws, bool kPlain>
inline void update_form(const StepTask& t, int64_t begin, int64_t end) {
  const bool aligned = t.cols % 128 == 0;
  if (t.second == kAsFirst) update_all<kAsFirst, kDraws, false, kPlain>(t, begin, end);
  if (t.second == kRank1)
    aligned ? update_all<kRank1, kDraws, true, kPlain>(t, begin, end)
            : update_all<kRank1, kDraws, false, kPlain>(t, begin, end);
  if (t.second == kFactored)
    aligned ? update_all<kFactored, kDraws, true, kPlain>(t, begin, end)
            : update_all<kFactored, kDraws, false, kPlain>(t, begin, end);
}

template <bool kDraws>
inline void update_rounded(const StepTask& t, int64_t begin, int64_t end) {
  is_plain(t) ? update_form<kDraws, true>(t, begin, end) : update_form<kDraws, false>(t, begin, end);
}

inline void update_adamw4(const StepTask& t, int64_t begin, int64_t end) {
  t.draws ? update_rounded<true>(t, begin, end) : update_rounded<false>(t, begin, end);
}

// The loops of adamw.cpp, compiled once per instruction set by foreach_isa.h.
#include "step/adamw_look.h"
#include "step/nibbles.h"

// Between the passes, one thread per tensor.
inline void settle(Task& t) {
  if (t.kind == kRank1) {
    if (t.dims > 2) {
      collect(t);
      spread(t, t.next, t.col_next);
    }
    t.unit = unit_of(t.v_table, t.next, t.rows, unit_of(t.v_table, t.col_next, t.cols, kUnit));
    invert(t.next, t.unit, t.row_inv, t.rows);
    invert(t.col_next, t.unit, t.col_inv, t.cols);
  } else if (t.kind == kFactored) {
    const int64_t chunks = (t.rows + t.chunk - 1) / t.chunk;
    for (int64_t j = 0; j < t.cols; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < chunks; ++k) sum += t.partial[k * t.cols + j];
      t.v_scale[j] = t.h.b2 * t.v_scale[j] + t.h.w2 * static_cast<float>(sum / t.rows);
    }
    const float* row = static_cast<const float*>(t.v);
    double sum = 0;
    for (int64_t i = 0; i < t.rows; ++i) sum += row[i];
    const float mean = static_cast<float>(sum / t.rows);
    for (int64_t i = 0; i < t.rows; ++i) t.ratio[i] = mean == 0.0f ? 0.0f : row[i] / mean;
  }
}

template <bool kPlain>
inline void update_exact(const Task& t, int64_t begin, int64_t end) {
  const Step s = splat_all(t.h);
  float *m = static_cast<float*>(t.m), *v = static_cast<float*>(t.v);
  float tail[4][16] = {};
  Draws draws;
  for (int64_t i = begin * 128; i < std::min(end * 128, t.n); i += 16) {
    const int64_t n = std::min<int64_t>(16, t.n - i);
    const bool apart = n < 16 || !t.direct();
    float *at[4] = {t.p + i, m + i, v + i, const_cast<float*>(t.g) + i};
    if (apart) {
      read_weights(t.p, t.p_type, t.beside, i, n, tail[0]);
      std::copy(m + i, m + i + n, tail[1]);
      std::copy(v + i, v + i + n, tail[2]);
      read_floats(t.g, t.g_type, i, n, tail[3]);
      for (int k = 0; k < 4; ++k) at[k] = tail[k];
    }
    const F g = gradient<kPlain>(s, load(at[3]), at[0]);
    const F first = load(at[1]), next = first + s.w1 * (g - first);
    const F square = second(s, g, load(at[2]));
    store(at[0], advance(s, load(at[0]), next, square));
    store(at[1], next);
    store(at[2], square);
    if (apart) {
      write_weights(t.p, t.p_type, t.beside, i, n, tail[0], draws);
      std::copy(tail[1], tail[1] + n, m + i);
      std::copy(tail[2], tail[2] + n, v + i);
    }
  }
}

// A block of 128 on its way: its new moments (the second as it is encoded) and what divides the
// step, while the next block's begin. One loop does the first half of a block and the second half
// of the one before: neither waits for the other's roots and quotients.
struct Block {
  alignas(64) float first[128], second[128], divisor[128];
};

// kApart: a last block that is not whole, or tensors that are not float32, go through buffers.
template <int kKind, bool kAligned, bool kPlain, bool kApart>
inline void update_blocks(const Task& t, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const Step s = splat_all(t.h);
  const F m_values = load(t.m_table), v_values = kKind == kFactored ? F{} : load(t.v_table);
  const SignedMap m_map = signed_map(t.m_table);
  const UnsignedMap v_map = kKind == kFactored ? UnsignedMap{} : unsigned_map(t.v_table, t.unit);
  uint8_t *m_codes = static_cast<uint8_t*>(t.m), *v_codes = static_cast<uint8_t*>(t.v);
  const float* row_scale = kKind == kFactored ? t.ratio : t.v_scale;
  const float* col_scale = kKind == kFactored ? t.v_scale : t.col_old;
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  alignas(64) float g_tail[128] = {}, p_tail[2][128] = {}, r[128], c[128], ri[128], ci[128];
  Block held[2] = {};
  SignedCoder m_coder = {};
  UnsignedCoder v_coder = {};
  Draws draws;
  Place place(begin, kAligned ? t.cols : 1);

  const auto start_codes = [&](int64_t b) __attribute__((always_inline)) {
    start(m_coder, m_map, t.m_scale[b]);
    if (kKind == kBlock) start(v_coder, v_map, t.v_scale[b]);
  };
  const auto second_half = [&](Block& block, float* p, int pair) __attribute__((always_inline)) {
    MT_UNROLL(2)
    for (int at = 32 * pair; at < 32 * pair + 32; at += 16) {
      const F step = (s.step * load(block.first + at)) / load(block.divisor + at);
      store(p + at, load(p + at) * s.decay - step);
    }
    take(m_coder, block.first, pair);
    if (kKind == kBlock) take_scaled(v_coder, block.second, pair);
    if (kKind == kRank1) take_unit(v_coder, block.second, pair);
  };
  const auto finish_codes = [&](Block& block, int64_t b) __attribute__((always_inline)) {
    finish(m_coder, m_map, block.first, t.m_scale[b], m_codes + b * 64);
    if (kKind == kBlock)
      finish_scaled(v_coder, v_map, block.second, t.v_scale[b], v_codes + b * 64);
    if (kKind == kRank1) finish_unit(v_coder, v_map, block.second, v_codes + b * 64);
  };

  for (int64_t b = begin; b < end; ++b) {
    Block &now = held[b & 1], &then = held[~b & 1];
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const float *g = kApart ? g_tail : t.g + from, *p = kApart ? p_tail[b & 1] : t.p + from;
    float* before = kApart ? p_tail[~b & 1] : t.p + from - 128;
    F old_row = {}, inv_row = {};
    const float *cs = c, *cinv = ci;
    I m_top = {}, v_top = {};
    if (kApart) {
      read_floats(t.g, t.g_type, from, n, g_tail);
      read_weights(t.p, t.p_type, t.beside, from, n, p_tail[b & 1]);
    } else {
      fetch(t.g + from), fetch(t.p + from);
    }
    if (kKind != kBlock && kAligned) {
      old_row = splat(row_scale[place.row]), cs = col_scale + place.col;
      if (kKind == kRank1) inv_row = splat(t.row_inv[place.row]), cinv = t.col_inv + place.col;
      place.advance(t.cols);
    } else if (kKind != kBlock) {
      gather(row_scale, col_scale, from, t.rows, t.cols, r, c);
      if (kKind == kRank1) gather(t.row_inv, t.col_inv, from, t.rows, t.cols, ri, ci);
    }
    const F m_scale = splat(t.m_scale[b]), v_scale = kKind == kBlock ? splat(t.v_scale[b]) : F{};
    if (b > begin) start_codes(b - 1);
    MT_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      const I m_byte = widen(m_codes + b * 64 + k * 16);
      const I v_byte = kKind == kFactored ? I{} : widen(v_codes + b * 64 + k * 16);
      MT_UNROLL(2)
      for (int h = 0; h < 2; ++h) {
        const int at = h * 64 + k * 16;
        const F grad = gradient<kPlain>(s, load(g + at), p + at);
        const F old = decode(m_values, h ? m_byte >> 4 : m_byte) * m_scale;
        F first = old + s.w1 * (grad - old), square;
        const F row = kAligned ? old_row : kKind == kBlock ? F{} : load(r + at);
        if (kKind == kFactored) {
          square = row * load(cs + at);
        } else {
          const F scale = kKind == kBlock ? v_scale : least(row, load(cs + at));
          square = second(s, grad, decode(v_values, h ? v_byte >> 4 : v_byte) * scale);
        }
        store(now.divisor + at, root(square) + s.eps);
        if (kApart) {  // what lies past the end is zero, as the reference pads
          const I inside = lane + at < static_cast<int32_t>(n);
          first = (F)((I)first & inside), square = (F)((I)square & inside);
        }
        m_top = imax(m_top, magnitude(first));
        if (kKind == kBlock) v_top = imax(v_top, magnitude(square));
        if (kKind == kRank1)
          square = square * (F)imax((I)(kAligned ? inv_row : load(ri + at)), (I)load(cinv + at));
        store(now.first + at, first);
        if (kKind != kFactored) store(now.second + at, square);
      }
      if (b > begin) second_half(then, before, k);
    }
    if (b > begin) {
      finish_codes(then, b - 1);
      if (kApart) write_weights(t.p, t.p_type, t.beside, from - 128, 128, before, draws);
    }
    t.m_scale[b] = as_float(top_of(m_top));
    if (kKind == kBlock) t.v_scale[b] = as_float(top_of(v_top));
  }

  const int64_t last = end - 1, n = std::min<int64_t>(128, t.n - last * 128);
  float* p = kApart ? p_tail[last & 1] : t.p + last * 128;
  start_codes(last);
  MT_UNROLL(4)
  for (int k = 0; k < 4; ++k) second_half(held[last & 1], p, k);
  finish_codes(held[last & 1], last);
  if (kApart) write_weights(t.p, t.p_type, t.beside, last * 128, n, p, draws);
}

template <int kKind, bool kAligned, bool kPlain>
inline void update_all(const Task& t, int64_t begin, int64_t end) {
  const int64_t whole = t.direct() ? std::min(end, t.n / 128) : begin;
  update_blocks<kKind, kAligned, kPlain, false>(t, begin, whole);
  if (whole < end) update_blocks<kKind, kAligned, kPlain, true>(t, whole, end);
}

template <bool kPlain>
inline void update_kind(const Task& t, int64_t begin, int64_t end) {
  const bool aligned = t.cols % 128 == 0;
  if (t.kind == kExact) update_exact<kPlain>(t, begin, end);
  if (t.kind == kBlock) update_all<kBlock, false, kPlain>(t, begin, end);
  if (t.kind == kRank1)
    aligned ? update_all<kRank1, true, kPlain>(t, begin, end)
            : update_all<kRank1, false, kPlain>(t, begin, end);
  if (t.kind == kFactored)
    aligned ? update_all<kFactored, true, kPlain>(t, begin, end)
            : update_all<kFactored, false, kPlain>(t, begin, end);
}

inline void update(const Task& t, int64_t begin, int64_t end) {
  is_plain(t) ? update_kind<true>(t, begin, end) : update_kind<false>(t, begin, end);
}

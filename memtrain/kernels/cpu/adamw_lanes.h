// The loops of adamw.cpp, compiled once per instruction set by foreach_isa.h.

struct Step {
  F decay, l2, sign, w1, b2, w2, step, eps;
  bool has_l2;
};

MT_INLINE Step splat_all(const Hyper& h) {
  return {splat(h.decay), splat(h.l2), splat(h.sign), splat(h.w1),  splat(h.b2),
          splat(h.w2),    splat(h.step), splat(h.eps), h.l2 != 0.0f};
}

MT_INLINE F gradient(const Step& s, F g, const float* p) {
  g = g * s.sign;
  return s.has_l2 ? g + s.l2 * load(p) : g;
}

MT_INLINE F second(const Step& s, F g, F v) { return s.b2 * v + (s.w2 * g) * g; }

MT_INLINE F advance(const Step& s, F p, F m, F v) {
  return p * s.decay - (s.step * m) / (root(v) + s.eps);
}

MT_INLINE F least(F a, F b) { return (F)imin(magnitude(a), magnitude(b)); }

// The maxima of dimensions 1 and up, spread over the flattened columns: the least counts.
inline void spread(const Task& t, const float* maxima, float* out) {
  for (int64_t j = 0; j < t.cols; ++j) {
    const float* part = maxima + t.rows + side(t);
    int64_t left = j;
    int32_t low = 0x7fffffff;
    for (int64_t d = t.dims - 1; d > 0; left /= t.shape[d], --d) {
      part -= t.shape[d];
      int32_t x;
      __builtin_memcpy(&x, part + left % t.shape[d], 4);
      low = x < low ? x : low;
    }
    __builtin_memcpy(out + j, &low, 4);
  }
}

// The reverse: the maxima of each dimension from the columns' maxima.
inline void collect(const Task& t) {
  for (int64_t j = 0; j < t.cols; ++j) {
    int32_t x;
    __builtin_memcpy(&x, t.col_next + j, 4);
    float* part = t.next + t.rows + side(t);
    int64_t left = j;
    for (int64_t d = t.dims - 1; d > 0; left /= t.shape[d], --d) {
      part -= t.shape[d];
      raise(reinterpret_cast<int32_t*>(part + left % t.shape[d]), x);
    }
  }
}

inline void invert(const float* scale, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = scale[i];
    out[i] = x >= 1.17549435e-38f && x <= 3.402823466e38f ? 1.0f / x : 0.0f;
  }
}

// Pass 1 of rank-1: the maxima of the new second moment.
inline void look_rank1(const Task& t, int64_t begin, int64_t end, std::vector<int32_t>& column) {
  column.assign(t.cols, 0);
  const Step s = splat_all(t.h);
  const F values = load(t.v_table);
  const uint8_t* codes = static_cast<const uint8_t*>(t.v);
  int32_t* rows = reinterpret_cast<int32_t*>(t.next);
  const bool aligned = t.cols % 128 == 0;
  float r[128], c[128], g_tail[128] = {}, p_tail[128] = {}, v[128];
  int64_t row = begin * 128 / t.cols;
  I top = {};
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const float *g = t.g + from, *p = t.p + from;
    if (n < 128) {
      std::copy(g, g + n, g_tail);
      std::copy(p, p + n, p_tail);
      g = g_tail, p = p_tail;
    }
    const int64_t i = from / t.cols, j = from % t.cols;
    const F old_row = splat(t.v_scale[i]);
    if (!aligned) gather(t.v_scale, t.col_old, from, t.rows, t.cols, r, c);
    if (i != row) {
      raise(rows + row, top_of(top));
      row = i, top = I{};
    }
    for (int k = 0; k < 64; k += 16) {
      const I byte = widen(codes + b * 64 + k);
      for (int h = 0; h < 2; ++h) {
        const int at = h * 64 + k;
        const F scale = aligned ? least(old_row, load(t.col_old + j + at))
                                : least(load(r + at), load(c + at));
        const F next = second(s, gradient(s, load(g + at), p + at),
                              decode(values, h ? byte >> 4 : byte) * scale);
        const I size = magnitude(next);
        if (aligned) {
          I col;
          __builtin_memcpy(&col, column.data() + j + at, 64);
          col = imax(col, size);
          __builtin_memcpy(column.data() + j + at, &col, 64);
          top = imax(top, size);
        } else {
          store(v + at, (F)size);
        }
      }
    }
    if (!aligned) {
      const int32_t* size = reinterpret_cast<const int32_t*>(v);
      int64_t ii = i, jj = j;
      for (int64_t k = 0; k < n; ++ii, jj = 0) {
        const int64_t run = std::min(t.cols - jj, n - k);
        int32_t most = 0;
        for (int64_t l = 0; l < run; ++l) {
          int32_t x;
          __builtin_memcpy(&x, size + k + l, 4);
          column[jj + l] = x > column[jj + l] ? x : column[jj + l];
          most = x > most ? x : most;
        }
        raise(rows + ii, most);
        k += run;
      }
    }
  }
  if (aligned) raise(rows + row, top_of(top));
  int32_t* cols = reinterpret_cast<int32_t*>(t.col_next);
  for (int64_t j = 0; j < t.cols; ++j) raise(cols + j, column[j]);
}

// Pass 1 of factored: row means into the state, column sums of these rows into `partial`.
inline void look_factored(const Task& t, int64_t begin, int64_t end) {
  const Step s = splat_all(t.h);
  float* partial = t.partial + begin / t.chunk * t.cols;
  float* row = static_cast<float*>(t.v);
  std::fill(partial, partial + t.cols, 0.0f);
  for (int64_t i = begin; i < end; ++i) {
    const float *g = t.g + i * t.cols, *p = t.p + i * t.cols;
    F sum = {};
    int64_t j = 0;
    for (; j + 16 <= t.cols; j += 16) {
      const F x = gradient(s, load(g + j), p + j), square = x * x;
      sum += square;
      store(partial + j, load(partial + j) + square);
    }
    double total = 0;
    for (int l = 0; l < 16; ++l) total += sum[l];
    for (; j < t.cols; ++j) {
      float x = g[j] * t.h.sign;
      if (s.has_l2) x = x + t.h.l2 * p[j];
      partial[j] += x * x;
      total += x * x;
    }
    row[i] = t.h.b2 * row[i] + t.h.w2 * static_cast<float>(total / t.cols);
  }
}

inline void look(const Task& t, int64_t begin, int64_t end, std::vector<int32_t>& column) {
  t.kind == kRank1 ? look_rank1(t, begin, end, column) : look_factored(t, begin, end);
}

// Between the passes, one thread per tensor.
inline void settle(const Task& t) {
  if (t.kind == kRank1) {
    invert(t.next, t.row_inv, t.rows);
    if (t.dims > 2) {
      collect(t);
      spread(t, t.next, t.col_next);
    }
    invert(t.col_next, t.col_inv, t.cols);
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

inline void update_exact(const Task& t, int64_t begin, int64_t end) {
  const Step s = splat_all(t.h);
  float *m = static_cast<float*>(t.m), *v = static_cast<float*>(t.v);
  float tail[4][16] = {};
  for (int64_t i = begin * 128; i < std::min(end * 128, t.n); i += 16) {
    const int64_t n = std::min<int64_t>(16, t.n - i);
    float *at[4] = {t.p + i, m + i, v + i, const_cast<float*>(t.g) + i};
    if (n < 16)
      for (int k = 0; k < 4; ++k) std::copy(at[k], at[k] + n, tail[k]), at[k] = tail[k];
    const F g = gradient(s, load(at[3]), at[0]);
    const F first = load(at[1]), next = first + s.w1 * (g - first);
    const F square = second(s, g, load(at[2]));
    store(at[0], advance(s, load(at[0]), next, square));
    store(at[1], next);
    store(at[2], square);
    if (n < 16) {
      std::copy(tail[0], tail[0] + n, t.p + i);
      std::copy(tail[1], tail[1] + n, m + i);
      std::copy(tail[2], tail[2] + n, v + i);
    }
  }
}

template <int kKind, bool kAligned>
inline void update_blocks(const Task& t, int64_t begin, int64_t end) {
  const Step s = splat_all(t.h);
  const F m_values = load(t.m_table), v_values = kKind == kFactored ? F{} : load(t.v_table);
  const Book v_book = kKind == kRank1 ? scaled(t.v_table, 1.0f) : Book{};
  uint8_t *m_codes = static_cast<uint8_t*>(t.m), *v_codes = static_cast<uint8_t*>(t.v);
  const float* row_scale = kKind == kFactored ? t.ratio : t.v_scale;
  const float* col_scale = kKind == kFactored ? t.v_scale : t.col_old;
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float g_tail[128] = {}, p_tail[128] = {}, r[128], c[128], ri[128], ci[128];
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const float* g = t.g + from;
    float* p = t.p + from;
    if (n < 128) {
      std::copy(g, g + n, g_tail);
      std::copy(p, p + n, p_tail);
      g = g_tail, p = p_tail;
    }
    F old_row = {}, inv_row = {};
    const float *cs = c, *cinv = ci;
    if (kKind != kBlock && kAligned) {
      const int64_t i = from / t.cols, j = from % t.cols;
      old_row = splat(row_scale[i]), cs = col_scale + j;
      if (kKind == kRank1) inv_row = splat(t.row_inv[i]), cinv = t.col_inv + j;
    } else if (kKind != kBlock) {
      gather(row_scale, col_scale, from, t.rows, t.cols, r, c);
      if (kKind == kRank1) gather(t.row_inv, t.col_inv, from, t.rows, t.cols, ri, ci);
    }
    const F m_scale = splat(t.m_scale[b]), v_scale = kKind == kBlock ? splat(t.v_scale[b]) : F{};
    F m[8], v[8];
    I m_top = {}, v_top = {};
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const I m_byte = widen(m_codes + b * 64 + k * 16);
      const I v_byte = kKind == kFactored ? I{} : widen(v_codes + b * 64 + k * 16);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int at = h * 64 + k * 16, x = h * 4 + k;
        const F grad = gradient(s, load(g + at), p + at);
        const F old = decode(m_values, h ? m_byte >> 4 : m_byte) * m_scale;
        F first = old + s.w1 * (grad - old), square;
        const F row = kAligned ? old_row : kKind == kBlock ? F{} : load(r + at);
        if (kKind == kFactored) {
          square = row * load(cs + at);
        } else {
          const F scale = kKind == kBlock ? v_scale : least(row, load(cs + at));
          square = second(s, grad, decode(v_values, h ? v_byte >> 4 : v_byte) * scale);
        }
        store(p + at, advance(s, load(p + at), first, square));
        if (n < 128) {  // what lies past the end is zero, as the reference pads
          const I inside = lane + at < static_cast<int32_t>(n);
          first = (F)((I)first & inside), square = (F)((I)square & inside);
        }
        m_top = imax(m_top, magnitude(first));
        if (kKind == kBlock) v_top = imax(v_top, magnitude(square));
        if (kKind == kRank1)
          square = square * (F)imax((I)(kAligned ? inv_row : load(ri + at)), (I)load(cinv + at));
        m[x] = first, v[x] = square;
      }
    }
    if (n < 128) std::copy(p_tail, p_tail + n, t.p + from);
    t.m_scale[b] = as_float(top_of(m_top));
    const Book m_book = scaled(t.m_table, t.m_scale[b]);
    Book book = v_book;
    if (kKind == kBlock) {
      t.v_scale[b] = as_float(top_of(v_top));
      book = scaled(t.v_table, t.v_scale[b]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      narrow(m_codes + b * 64 + k * 16, encode(m_book, m[k]) | encode(m_book, m[4 + k]) << 4);
      if (kKind != kFactored)
        narrow(v_codes + b * 64 + k * 16, encode(book, v[k]) | encode(book, v[4 + k]) << 4);
    }
  }
}

inline void update(const Task& t, int64_t begin, int64_t end) {
  const bool aligned = t.cols % 128 == 0;
  if (t.kind == kExact) update_exact(t, begin, end);
  if (t.kind == kBlock) update_blocks<kBlock, false>(t, begin, end);
  if (t.kind == kRank1)
    aligned ? update_blocks<kRank1, true>(t, begin, end)
            : update_blocks<kRank1, false>(t, begin, end);
  if (t.kind == kFactored)
    aligned ? update_blocks<kFactored, true>(t, begin, end)
            : update_blocks<kFactored, false>(t, begin, end);
}

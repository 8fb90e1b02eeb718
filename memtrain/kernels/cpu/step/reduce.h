// Pass 1 of step.cpp, compiled once per instruction set by foreach_isa.h, and what is done between the passes.
#include "step/lines.h"
#include "step/rules.h"

// A number that is not NaN, at most the largest float.
MT_INLINE float finite(float x) { return x > FLT_MAX ? FLT_MAX : x; }

// The block after next. Measured on one quiet core: a seventh of the step's time on tensors that
// no cache holds. Addresses past the end do no harm.
MT_INLINE void fetch(const float* x) {
  MT_UNROLL(8)
  for (int i = 0; i < 128; i += 16) __builtin_prefetch(x + 256 + i);
}

// The maxima of dimensions 1 and up, spread over the flattened columns: the least counts.
inline void spread(const StepTask& t, const float* maxima, float* out) {
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
inline void collect(const StepTask& t) {
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

// The maxima of rows and columns raised by `n` values that start at a place.
inline void scatter_maxima(const int32_t* sizes, int64_t n, Place at, int64_t cols, int32_t* rows,
                           int32_t* column) {
  for (int64_t k = 0; k < n; ++at.row, at.col = 0) {
    const int64_t run = std::min(cols - at.col, n - k);
    int32_t most = 0;
    for (int64_t l = 0; l < run; ++l) {
      const int32_t x = sizes[k + l];
      int32_t& top = column[at.col + l];
      top = x > top ? x : top;
      most = x > most ? x : most;
    }
    raise(rows + at.row, most);
    k += run;
  }
}

// The reciprocals of maxima.
inline void invert(const float* scale, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = scale[i];
    out[i] = x >= 1.17549435e-38f && x <= 3.402823466e38f ? 1.0f / x : 0.0f;
  }
}

// Pass 1 of rank-1: the maxima of the new second moment.
template <bool kAligned>
inline void reduce_rank1(const StepTask& t, int64_t begin, int64_t end, Column& held) {
  int32_t* column = held.zeros(t.cols);
  const Scalars s = splat_all(t.scalars);
  const F values = load(t.state[1].codebook);
  const uint8_t* codes = static_cast<const uint8_t*>(t.state[1].data);
  int32_t* rows = reinterpret_cast<int32_t*>(t.next);
  float r[128], c[128], g_tail[128] = {}, p_tail[128] = {};
  int32_t sizes[128];
  Place at(begin * 128, t.cols);
  int64_t row = at.row;
  I top = {};
  for (int64_t b = begin; b < end; ++b, at.advance(t.cols, 128)) {
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const float *g = t.g + from, *p = t.p + from;
    if (n < 128 || !t.direct()) {
      read_floats(t.g, t.g_type, from, n, g_tail);
      read_weights(t.p, t.p_type, t.master, from, n, p_tail);
      g = g_tail, p = p_tail;
    }
    if (!kAligned) gather(t.state[1].scale, t.col_old, from, t.rows, t.cols, r, c);
    if (kAligned && at.row != row) {
      raise(rows + row, top_of(top));
      row = at.row, top = I{};
    }
    fetch(t.g + from);
    const F old_row = splat(t.state[1].scale[at.row]);
    const float* old_col = kAligned ? t.col_old + at.col : c;
    MT_UNROLL(4)
    for (int k = 0; k < 64; k += 16) {
      const I byte = widen(codes + b * 64 + k);
      MT_UNROLL(2)
      for (int h = 0; h < 2; ++h) {
        const int x = h * 64 + k;
        const F scale = least(kAligned ? old_row : load(r + x), load(old_col + x));
        const F old = decode(values, h ? byte >> 4 : byte) * scale;
        const I size = magnitude(AdamW::second(s, gradient(s, g + x, p + x), old));
        if (kAligned) {
          int32_t* col = column + at.col + x;
          store((float*)col, (F)imax((I)load((const float*)col), size));
          top = imax(top, size);
        } else {
          store((float*)sizes + x, (F)size);
        }
      }
    }
    if (!kAligned) scatter_maxima(sizes, n, at, t.cols, rows, column);
  }
  if (kAligned) raise(rows + row, top_of(top));
  int32_t* cols = reinterpret_cast<int32_t*>(t.col_next);
  for (int64_t j = 0; j < t.cols; ++j) raise(cols + j, column[j]);
}

// Squares of a part of a row: into the columns' sums, the lanes' and (past whole lanes) `rest`.
MT_INLINE void add_squares(const Scalars& s, const float* h, const float* g, const float* p, int64_t n,
                           float* columns, F& sum, double& rest) {
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    __builtin_prefetch(g + j + 512);
    const F x = gradient(s, g + j, p + j), square = x * x;
    sum += square;
    store(columns + j, load(columns + j) + square);
  }
  for (; j < n; ++j) {
    float x = g[j] * h[2];
    if (s.has_l2) x = x + h[1] * p[j];
    columns[j] += x * x;
    rest += x * x;
  }
}

// Pass 1 of factored: row means into the state, column sums of these rows of one chunk into `partial`.
inline void reduce_factored(const StepTask& t, int64_t begin, int64_t end) {
  const Scalars s = splat_all(t.scalars);
  float* partial = t.partial + begin / t.chunk * t.cols;
  float* row = static_cast<float*>(t.state[1].data);
  float g_part[kPart], p_part[kPart];
  std::fill(partial, partial + t.cols, 0.0f);
  for (int64_t i = begin; i < end; ++i) {
    F sum = {};
    double rest = 0;
    for (int64_t from = 0; from < t.cols; from += kPart) {
      const int64_t n = std::min(kPart, t.cols - from), at = i * t.cols + from;
      const float *g = t.g + at, *p = t.p + at;
      if (!t.direct()) {
        read_floats(t.g, t.g_type, at, n, g_part);
        read_weights(t.p, t.p_type, t.master, at, n, p_part);
        g = g_part, p = p_part;
      }
      add_squares(s, t.scalars, g, p, n, partial + from, sum, rest);
    }
    double total = 0;
    for (int l = 0; l < 16; ++l) total += sum[l];
    row[i] = t.scalars[4] * row[i] + t.scalars[5] * static_cast<float>((total + rest) / t.cols);
  }
}

inline void reduce(const StepTask& t, int64_t begin, int64_t end, Column& held) {
  if (t.second == kFactored) reduce_factored(t, begin, end);
  else t.cols % 128 ? reduce_rank1<false>(t, begin, end, held) : reduce_rank1<true>(t, begin, end, held);
}

#include "step/adamw2.h"

// Between the passes, one thread per tensor.
inline void finalize_scales(StepTask& t) {
  if (t.second == kRank1) {
    if (t.dims > 2) {
      collect(t);
      spread(t, t.next, t.col_next);
    }
    invert(t.next, t.row_inv, t.rows);
    invert(t.col_next, t.col_inv, t.cols);
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

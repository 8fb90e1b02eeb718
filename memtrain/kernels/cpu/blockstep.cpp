// SGD, Lion and AdamW over many tensors with states in blocks (contract: kernels/blockstep.py).
#ifndef MT_LANES
#define MT_SELF "blockstep.cpp"
#include "halves.h"

namespace memtrain {
namespace {

enum Rule : int64_t { kAdamW, kSgd, kLion };
constexpr int64_t kPiece = 65536;                       // elements that a thread takes at once

struct State {
  void* data;  // codes, or the state itself
  float* scale;
  const float* book;
  const uint8_t* buckets;
};

// One row of the table that Python sends.
struct BlockRow {
  float* p;  // of p_type, g of g_type: as floats only where both are
  const float* g;
  State state[2];
  const float* numbers;
  int64_t n, rule, bits, p_type, g_type;
  bool direct() const { return p_type == kFloat32 && g_type == kFloat32; }
  int64_t block() const { return bits == 8 ? 256 : 128; }
};
static_assert(sizeof(BlockRow) == 16 * 8, "the table's rows have 16 fields of 8 bytes");

struct Piece {
  const BlockRow* row;
  int64_t begin, end;  // blocks
};

}  // namespace
}  // namespace memtrain

#include "foreach_isa.h"

// `table`: int64 [n, 16], see BlockRow.
MT_EXPORT void mt_block_step(const memtrain::BlockRow* table, int64_t n, int64_t threads) {
  using namespace memtrain;
  std::vector<Piece> pieces;
  int64_t elements = 0;
  for (const BlockRow* row = table; row < table + n; ++row) {
    const int64_t blocks = (row->n + row->block() - 1) / row->block(), chunk = kPiece / row->block();
    for (int64_t b = 0; b < blocks; b += chunk) pieces.push_back({row, b, std::min(blocks, b + chunk)});
    elements += row->n;
  }
  const int64_t crew = std::max<int64_t>(1, std::min(threads, elements / 32768));
  parallel_for(pieces.size(), 1, crew, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      MT_DISPATCH(step_piece(*pieces[i].row, pieces[i].begin, pieces[i].end));
  });
}

#else

struct Numbers {
  F decay, l2, sign, a, b, c, d, e;  // the last five as the rule's tuple in blockstep.py has them
  bool has_l2, nesterov;
};

MT_INLINE Numbers splat_all(const float* x) {
  return {splat(x[0]), splat(x[1]), splat(x[2]), splat(x[3]), splat(x[4]),
          splat(x[5]), splat(x[6]), splat(x[7]), x[1] != 0.0f, x[5] != 0.0f};
}

template <int kRule>
MT_INLINE F advance(const Numbers& h, F p, F g, F& m, F& v) {
  if (kRule == kAdamW) {
    m = m + h.a * (g - m);
    v = h.b * v + (h.c * g) * g;
    return p * h.decay - (h.d * m) / (root(v) + h.e);
  }
  if (kRule == kSgd) {
    m = h.a * m + h.b * g;
    return p - h.d * (h.nesterov ? g + h.c * m : m);
  }
  const F c = h.a * m + h.b * g, zero = {};
  const F step = c > zero ? splat(1.0f) : c < zero ? splat(-1.0f) : c;  // NaN stays NaN
  m = h.c * m + h.d * g;
  return p * h.decay - h.e * step;
}

#include "dynamic.h"

// The 8-bit codes of a block whose scale is too far from 1 to divide by: bounds counted one by one.
inline void count8(const State& s, const float* x, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < 256; i += 16) {
    I count = {};
    MT_UNROLL(1)
    for (int64_t k = 256; k < 511; ++k) count -= load(x + i) > splat(s.book[k] * scale);
    narrow(codes + i, count);
  }
}

// The block's part of a state, as floats.
template <int kBits, bool kSigned>
inline void fetch(const State& s, const Dynamic& d, int64_t b, int64_t n, float* x) {
  constexpr int64_t kSize = kBits == 8 ? 256 : 128;
  if (kBits == 32) {
    std::memcpy(x, static_cast<const float*>(s.data) + b * kSize, n * 4);
    return;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(s.data) + b * (kBits == 8 ? 256 : 64);
  const F scale = splat(s.scale[b]);
  if (kBits == 8) {
    for (int64_t i = 0; i < 256; i += 64) decode8<kSigned>(d, codes + i, scale, x + i);
    return;
  }
  const F values = load(s.book);
  for (int64_t i = 0; i < 64; i += 16) {
    const I byte = widen(codes + i);
    store(x + i, decode(values, byte) * scale);
    store(x + i + 64, decode(values, byte >> 4) * scale);
  }
}

template <int kBits, bool kSigned>
inline void keep(const State& s, const Dynamic& d, int64_t b, const float* x, float scale) {
  uint8_t* codes = static_cast<uint8_t*>(s.data) + b * (kBits == 8 ? 256 : 64);
  s.scale[b] = scale;
  if (kBits == 4) {
    const Book book = scaled(s.book, scale);
    MT_UNROLL(1)
    for (int64_t i = 0; i < 64; i += 16)
      narrow(codes + i, encode(book, load(x + i)) | encode(book, load(x + 64 + i)) << 4);
    return;
  }
  // Nothing is above a bound times 0 or NaN, and a scale of Inf counts as NaN.
  if (!(scale > 0.0f && scale <= 0x1.fffffep127f)) return static_cast<void>(std::memset(codes, 0, 256));
  if (!(scale >= 0x1p-90f && scale <= 0x1p90f)) return count8(s, x, scale, codes);
  const F wide = splat(scale), inverse = splat(1.0f / scale);
  for (int64_t i = 0; i < 256; i += 64) encode8<kSigned>(d, x + i, wide, inverse, codes + i);
}

template <int kRule, int kBits>
inline void step_blocks(const BlockRow& t, int64_t begin, int64_t end) {
  constexpr int64_t kSize = kBits == 8 ? 256 : 128;
  constexpr int kStates = kRule == kAdamW ? 2 : 1;
  const Numbers h = splat_all(t.numbers);
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Dynamic first{}, second{};
  if (kBits == 8) first = dynamic_of<true>(t.state[0].book, t.state[0].buckets);
  if (kStates == 2) second = dynamic_of<false>(t.state[1].book, t.state[1].buckets);
  float g_part[kSize] = {}, p_part[kSize] = {}, held[2][kSize] = {};
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * kSize, n = std::min(kSize, t.n - from);
    const bool apart = n < kSize || !t.direct();
    const float* g = t.g + from;
    float* p = t.p + from;
    if (apart) {
      read_floats(t.g, t.g_type, from, n, g_part);
      read_floats(t.p, t.p_type, from, n, p_part);
      g = g_part, p = p_part;
    }
    fetch<kBits, true>(t.state[0], first, b, n, held[0]);
    if (kStates == 2) fetch<kBits, false>(t.state[1], second, b, n, held[1]);
    I top[2] = {};
    MT_UNROLL(1)
    for (int64_t at = 0; at < kSize; at += 16) {
      if (!apart) __builtin_prefetch(g + at + 2 * kSize), __builtin_prefetch(p + at + 2 * kSize);
      F grad = load(g + at) * h.sign, x[2] = {};
      const F old = load(p + at);
      if (h.has_l2) grad = grad + h.l2 * old;
      for (int k = 0; k < kStates; ++k) x[k] = load(held[k] + at);
      store(p + at, advance<kRule>(h, old, grad, x[0], x[1]));
      for (int k = 0; k < kStates; ++k) {
        if (n < kSize) {  // what lies past the end is zero, as the reference pads
          const I inside = lane + static_cast<int32_t>(at) < static_cast<int32_t>(n);
          x[k] = (F)((I)x[k] & inside);
        }
        top[k] = imax(top[k], magnitude(x[k]));
        store(held[k] + at, x[k]);
      }
    }
    if (apart) write_floats(t.p, t.p_type, from, n, p_part);
    if (kBits == 32) std::memcpy(static_cast<float*>(t.state[0].data) + from, held[0], n * 4);
    if (kBits < 32) keep<kBits, true>(t.state[0], first, b, held[0], as_float(top_of(top[0])));
    if (kStates == 2) keep<kBits, false>(t.state[1], second, b, held[1], as_float(top_of(top[1])));
  }
}

template <int kRule>
inline void step_rule(const BlockRow& t, int64_t begin, int64_t end) {
  if (t.bits == 8) step_blocks<kRule, 8>(t, begin, end);
  if (t.bits == 4) step_blocks<kRule, 4>(t, begin, end);
  if (t.bits == 32) step_blocks<kRule, 32>(t, begin, end);
}

inline void step_piece(const BlockRow& t, int64_t begin, int64_t end) {
  if (t.rule == kAdamW) step_blocks<kAdamW, 8>(t, begin, end);
  if (t.rule == kSgd) step_rule<kSgd>(t, begin, end);
  if (t.rule == kLion) step_rule<kLion>(t, begin, end);
}

#endif

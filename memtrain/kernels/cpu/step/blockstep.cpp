// SGD, Lion and AdamW over many tensors with states in blocks (contract: kernels/step/blockstep.py).
#ifndef MT_LANES
#define MT_SELF "step/blockstep.cpp"
#include "step/weights.h"

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
  Beside beside;
  bool direct() const { return p_type == kFloat32 && g_type == kFloat32; }
  int64_t block() const { return bits == 8 ? 256 : 128; }
};
static_assert(sizeof(BlockRow) == 20 * 8, "the table's rows have 20 fields of 8 bytes");

struct Piece {
  const BlockRow* row;
  int64_t begin, end;  // blocks
};

}  // namespace
}  // namespace memtrain

#include "foreach_isa.h"

// `table`: int64 [n, 20], see BlockRow.
MT_EXPORT void mt_blockstep(const memtrain::BlockRow* table, int64_t n, int64_t threads) {
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

// AdamW's new moments, and what divides its step.
MT_INLINE F moments(const Numbers& h, F g, F& m, F& v) {
  m = m + h.a * (g - m);
  v = h.b * v + (h.c * g) * g;
  return root(v) + h.e;
}

// The new parameter of the others.
template <int kRule>
MT_INLINE F advance(const Numbers& h, F p, F g, F& m) {
  if (kRule == kSgd) {
    m = h.a * m + h.b * g;
    return p - h.d * (h.nesterov ? g + h.c * m : m);
  }
  const F c = h.a * m + h.b * g, zero = {};
  const F step = c > zero ? splat(1.0f) : c < zero ? splat(-1.0f) : c;  // NaN stays NaN
  m = h.c * m + h.d * g;
  return p * h.decay - h.e * step;
}

#include "step/dynamic.h"

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
template <int kBits>
inline void fetch(const State& s, int64_t b, int64_t n, float* x) {
  if (kBits == 32) {
    std::memcpy(x, static_cast<const float*>(s.data) + b * 128, n * 4);
    return;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(s.data) + b * 64;
  const F scale = splat(s.scale[b]), values = load(s.book);
  for (int64_t i = 0; i < 64; i += 16) {
    const I byte = widen(codes + i);
    store(x + i, decode(values, byte) * scale);
    store(x + i + 64, decode(values, byte >> 4) * scale);
  }
}

// A block of 8 bits that has its new values, and waits for its codes.
struct Waiting {
  uint8_t* codes;
  F scale, inverse;
  bool usual;
};

// What no loop serves is done at once.
MT_HELPER Waiting wait_for(const State& s, int64_t b, const float* x, float scale) {
  uint8_t* codes = static_cast<uint8_t*>(s.data) + b * 256;
  s.scale[b] = scale;
  const bool usual = scale >= 0x1p-90f && scale <= 0x1p90f;
  // Nothing is above a bound times 0 or NaN, and a scale of Inf counts as NaN.
  if (!(scale > 0.0f && scale <= 0x1.fffffep127f)) std::memset(codes, 0, 256);
  else if (!usual) count8(s, x, scale, codes);
  return {codes, splat(scale), splat(1.0f / scale), usual};
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

// The codes of a block are made, and AdamW's quotients taken, in the loop of the next one: neither
// waits for the other's roots and quotients, which take a third of the time.
template <int kRule, bool kPlain>
inline void step_bytes(const BlockRow& t, int64_t begin, int64_t end) {
  constexpr bool kLate = kRule == kAdamW;
  constexpr int kStates = kLate ? 2 : 1;
  const Numbers h = splat_all(t.numbers);
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Dynamic first = dynamic_of<true>(t.state[0].book, t.state[0].buckets);
  Dynamic second{};
  if (kStates == 2) second = dynamic_of<false>(t.state[1].book, t.state[1].buckets);
  alignas(64) Room part = {};
  Draws draws;
  alignas(64) float held[2][kStates + kLate][256] = {};  // the states, and AdamW's divisors
  Waiting waiting[2] = {};
  for (int64_t b = begin; b <= end; ++b) {
    float (*now)[256] = held[b & 1], (*then)[256] = held[~b & 1];
    const int64_t from = b * 256, n = std::min<int64_t>(256, t.n - from);
    const bool apart = n < 256 || !t.direct();
    const float* g = apart ? part.g : t.g + from;
    float* p = apart ? part.p[b & 1] : t.p + from;
    // The block before is the last one, and in part, only after it.
    float* before = t.direct() && from <= t.n ? t.p + from - 256 : part.p[~b & 1];
    if (b < end && apart) {
      read_floats(t.g, t.g_type, from, n, part.g);
      read_weights(t.p, t.p_type, t.beside, from, n, p);
    }
    I top[2] = {};
    MT_UNROLL(1)
    for (int64_t at = 0; at < 256; at += 64) {
      if (b < end) {
        __builtin_prefetch(static_cast<uint8_t*>(t.state[0].data) + from + at + 512, 1);
        if (kStates == 2) __builtin_prefetch(static_cast<uint8_t*>(t.state[1].data) + from + at + 512, 1);
        decode8<true>(first, static_cast<uint8_t*>(t.state[0].data) + from + at, splat(t.state[0].scale[b]), now[0] + at);
        if (kStates == 2) decode8<false>(second, static_cast<uint8_t*>(t.state[1].data) + from + at, splat(t.state[1].scale[b]), now[1] + at);
        MT_UNROLL(4)
        for (int64_t i = at; i < at + 64; i += 16) {
          if (!apart) __builtin_prefetch(g + i + 512), __builtin_prefetch(p + i + 512, 1);
          F grad = load(g + i), x[2] = {};
          const F old = load(p + i);
          if (!kPlain) grad = grad * h.sign;
          if (!kPlain && h.has_l2) grad = grad + h.l2 * old;
          for (int k = 0; k < kStates; ++k) x[k] = load(now[k] + i);
          if constexpr (kLate) store(now[2] + i, moments(h, grad, x[0], x[1]));
          else store(p + i, advance<kRule>(h, old, grad, x[0]));
          for (int k = 0; k < kStates; ++k) {
            if (n < 256) {  // what lies past the end is zero, as the reference pads
              const I inside = lane + static_cast<int32_t>(i) < static_cast<int32_t>(n);
              x[k] = (F)((I)x[k] & inside);
            }
            top[k] = k == 0 ? imax(top[k], magnitude(x[k])) : highest(top[k], x[k]);
            store(now[k] + i, x[k]);
          }
        }
      }
      if (kLate && b > begin) {
        MT_UNROLL(4)
        for (int64_t i = at; i < at + 64; i += 16)
          store(before + i, load(before + i) * h.decay - (h.d * load(then[0] + i)) / load(then[kLate * 2] + i));
      }
      if (waiting[0].usual) encode8<true>(first, then[0] + at, waiting[0].scale, waiting[0].inverse, waiting[0].codes + at);
      if (kStates == 2 && waiting[1].usual) encode8<false>(second, then[1] + at, waiting[1].scale, waiting[1].inverse, waiting[1].codes + at);
    }
    if (kLate && b > begin && before == part.p[~b & 1])
      write_weights(t.p, t.p_type, t.beside, from - 256, std::min<int64_t>(256, t.n - from + 256), before, draws);
    if (b == end) break;
    if (!kLate && apart) write_weights(t.p, t.p_type, t.beside, from, n, p, draws);
    for (int k = 0; k < kStates; ++k) waiting[k] = wait_for(t.state[k], b, now[k], as_float(top_of(top[k] & 0x7fffffff)));
  }
}

// Only the AVX-512 form has loops of its own for the usual case: neither maximised nor with L2 decay.
template <int kRule>
inline void step_eight(const BlockRow& t, int64_t begin, int64_t end) {
#ifdef MT_AVX512
  if (t.numbers[1] == 0.0f && t.numbers[2] == 1.0f) return step_bytes<kRule, true>(t, begin, end);
#endif
  step_bytes<kRule, false>(t, begin, end);
}

template <int kBits>
inline void keep(const State& s, int64_t b, const float* x, float scale) {
  uint8_t* codes = static_cast<uint8_t*>(s.data) + b * 64;
  s.scale[b] = scale;
  const Book book = scaled(s.book, scale);
  MT_UNROLL(1)
  for (int64_t i = 0; i < 64; i += 16)
    narrow(codes + i, encode(book, load(x + i)) | encode(book, load(x + 64 + i)) << 4);
}

// SGD and Lion with 4 or 32 bits, or without a state: held stays zero.
template <int kRule, int kBits>
inline void step_blocks(const BlockRow& t, int64_t begin, int64_t end) {
  const Numbers h = splat_all(t.numbers);
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float g_part[128] = {}, p_part[128] = {}, held[128] = {};
  Draws draws;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t from = b * 128, n = std::min<int64_t>(128, t.n - from);
    const bool apart = n < 128 || !t.direct();
    const float* g = t.g + from;
    float* p = t.p + from;
    if (apart) {
      read_floats(t.g, t.g_type, from, n, g_part);
      read_weights(t.p, t.p_type, t.beside, from, n, p_part);
      g = g_part, p = p_part;
    }
    if (kBits > 0) fetch<kBits>(t.state[0], b, n, held);
    I top = {};
    MT_UNROLL(1)
    for (int64_t at = 0; at < 128; at += 16) {
      if (!apart) __builtin_prefetch(g + at + 256), __builtin_prefetch(p + at + 256);
      F grad = load(g + at) * h.sign, x = load(held + at);
      const F old = load(p + at);
      if (h.has_l2) grad = grad + h.l2 * old;
      store(p + at, advance<kRule>(h, old, grad, x));
      if (n < 128) {  // what lies past the end is zero, as the reference pads
        const I inside = lane + static_cast<int32_t>(at) < static_cast<int32_t>(n);
        x = (F)((I)x & inside);
      }
      top = imax(top, magnitude(x));
      if (kBits > 0) store(held + at, x);
    }
    if (apart) write_weights(t.p, t.p_type, t.beside, from, n, p_part, draws);
    if (kBits == 32) std::memcpy(static_cast<float*>(t.state[0].data) + from, held, n * 4);
    if (kBits == 4) keep<kBits>(t.state[0], b, held, as_float(top_of(top)));
  }
}

template <int kRule>
inline void step_rule(const BlockRow& t, int64_t begin, int64_t end) {
  if (t.bits == 8) step_eight<kRule>(t, begin, end);
  if (t.bits == 4) step_blocks<kRule, 4>(t, begin, end);
  if (t.bits == 32) step_blocks<kRule, 32>(t, begin, end);
  if (t.bits == 0) step_blocks<kRule, 0>(t, begin, end);
}

inline void step_piece(const BlockRow& t, int64_t begin, int64_t end) {
  if (t.rule == kAdamW) step_eight<kAdamW>(t, begin, end);
  if (t.rule == kSgd) step_rule<kSgd>(t, begin, end);
  if (t.rule == kLion) step_rule<kLion>(t, begin, end);
}

#endif

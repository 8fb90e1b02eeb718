// Few-bit derivative codes (contract: kernels/derivative/derivative.py; layout: kernels/packing/bits.py).
//
// A block of 256 is read as floats and worked on while it is in the nearest cache, so that dtypes and
// widths do not multiply.
#ifndef MT_LANES
#define MT_SELF "derivative/derivative.cpp"
#include <cmath>
#include <cstring>

#include "floats/runs.h"

namespace memtrain {

constexpr int64_t kBlock = 256;
constexpr int64_t kGrain = 128;  // a thread's piece in blocks: some 10 us

constexpr int64_t kFloat64 = 3;  // after the types of halves.h
enum Parity : int64_t { kPlain, kEven, kBand };

// Arguments of both kernels; the order is that of `_encoder` and `_decoder` in derivative.py.
struct Derivative {
  const void* table;  // boundaries, or levels; levels of doubles are doubles
  int64_t dtype, bits, parity;
  const void* in;  // the tensor, or its gradient: null where the levels themselves are wanted
  uint8_t* codes;
  void* out;
  int64_t n, threads;
};

// The block from element `at` on, filled up with 0: where it lies if that is possible, else `room`.
static const float* read_block(const void* x, int64_t dtype, int64_t at, int64_t n, float* room) {
  const int64_t count = std::min(kBlock, n - at);
  if (dtype == kFloat32 && count == kBlock) return static_cast<const float*>(x) + at;
  std::memset(room + count, 0, (kBlock - count) * sizeof(float));
  if (dtype == kFloat64)
    for (int64_t i = 0; i < count; ++i) room[i] = static_cast<float>(static_cast<const double*>(x)[at + i]);
  else
    read_floats(x, dtype, at, count, room);
  return room;
}

// Where a block's results are made: in place, or in `room`, which `write_block` takes there.
static float* place_block(void* y, int64_t dtype, int64_t at, int64_t n, float* room) {
  return dtype == kFloat32 && n - at >= kBlock ? static_cast<float*>(y) + at : room;
}

static void write_block(void* y, int64_t dtype, int64_t at, int64_t n, const float* made) {
  if (dtype != kFloat32 || made != static_cast<float*>(y) + at)
    write_floats(y, dtype, at, std::min(kBlock, n - at), made);
}

}  // namespace memtrain

#include "foreach_isa.h"

// Codes of `in`.
MT_EXPORT void mt_derivative_encode(const memtrain::Derivative* call) {
  const memtrain::Derivative job = *call;
  memtrain::parallel_for((job.n + 255) / 256, memtrain::kGrain, job.threads,
                         [&job](int64_t begin, int64_t end) {
                           MT_DISPATCH(encode_range(job, begin, end));
                         });
}

// out = in * level of each code; without `in`, the levels.
MT_EXPORT void mt_derivative_decode(const memtrain::Derivative* call) {
  const memtrain::Derivative job = *call;
  memtrain::parallel_for((job.n + 255) / 256, memtrain::kGrain, job.threads,
                         [&job](int64_t begin, int64_t end) {
                           MT_DISPATCH(decode_range(job, begin, end));
                         });
}

#else

#include "packing/slices.h"

// The number of boundaries below v; NaN has none.
template <int kBits>
struct Boundaries {
  const float* table;
  F each[3];
  Codebook book;
  MT_MEMBER explicit Boundaries(const float* from) : table(from), book() {
    float all[16];
    for (int i = 0; i < 16; ++i) all[i] = kBits <= 4 && i < (1 << kBits) - 1 ? from[i] : INFINITY;
    for (int i = 0; i < 3; ++i) each[i] = splat(all[i]);
    book = with_bounds(splat(0.0f), load(all));
  }
  MT_MEMBER I code_of(F v) const {
    if constexpr (kBits == 1) return (v > each[0]) & 1;
    if constexpr (kBits == 2) return (((v > each[0]) & 1) - (v > each[1])) - (v > each[2]);
    if constexpr (kBits <= 4) return encode(book, v);
    I at = splat_int(0);
    for (int step = 1 << (kBits - 1); step > 0; step /= 2)
      at = at + ((v > look_up(table, at + (step - 1))) & step);
    return at;
  }
};

// One bit: whether v lies above `low`, up to `high`.
struct Band {
  F low, high;
  MT_MEMBER explicit Band(const float* from) : low(splat(from[0])), high(splat(from[1])) {}
  MT_MEMBER I code_of(F v) const { return (v > low) & ((v > high) + 1); }
};

template <int kBits, typename Codes>
inline void encode_blocks(const Derivative& s, int64_t begin, int64_t end) {
  const Codes codes_of(static_cast<const float*>(s.table));
  const I kept = splat_int(s.parity == kEven ? 0x7FFFFFFF : -1);
  float room[kBlock];
  for (int64_t b = begin; b < end; ++b) {
    const float* x = read_block(s.in, s.dtype, b * kBlock, s.n, room);
    for (int at = 0; at < 32; at += 16) {
      I codes[8];
      MT_UNROLL(8)
      for (int k = 0; k < 8; ++k)
        codes[k] = codes_of.code_of((F)((I)load(x + 32 * k + at) & kept));
      store_codes<kBits>(s.codes + b * (32 * kBits) + at, codes, 32);
    }
  }
}

inline void encode_range(const Derivative& s, int64_t begin, int64_t end) {
  if (s.parity == kBand) return encode_blocks<1, Band>(s, begin, end);
  with_bits(s.bits, [&](auto bits) { encode_blocks<bits, Boundaries<bits>>(s, begin, end); });
}

template <int kBits>
inline void decode_blocks(const Derivative& s, int64_t begin, int64_t end) {
  const float* levels = static_cast<const float*>(s.table);
  float all[16] = {}, room[kBlock], made[kBlock];
  if (kBits <= 4 && s.dtype != kFloat64) std::memcpy(all, levels, sizeof(float) << kBits);
  const F values = load(all);
  for (int i = 0; i < kBlock; ++i) room[i] = 1.0f;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = b * kBlock;
    alignas(64) int32_t code[kBlock];
    I codes[2][8];
    for (int half = 0; half < 2; ++half)
      load_codes<kBits>(s.codes + b * (32 * kBits) + 16 * half, codes[half], 32);
    if (s.dtype == kFloat64) {
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 8; ++k) store(code + 32 * k + 16 * half, codes[half][k]);
      const double* grad = static_cast<const double*>(s.in);
      for (int64_t i = 0; i < kBlock && first + i < s.n; ++i) {
        const double level = static_cast<const double*>(s.table)[code[i]];
        static_cast<double*>(s.out)[first + i] = grad != nullptr ? grad[first + i] * level : level;
      }
      continue;
    }
    const float* grad = room;
    if (s.in != nullptr) grad = read_block(s.in, s.dtype, first, s.n, room);
    float* out = place_block(s.out, s.dtype, first, s.n, made);
    for (int half = 0; half < 2; ++half)
      MT_UNROLL(8)
      for (int k = 0; k < 8; ++k) {
        const F level = kBits <= 4 ? decode(values, codes[half][k]) : look_up(levels, codes[half][k]);
        const int at = 32 * k + 16 * half;
        store(out + at, load(grad + at) * level);
      }
    write_block(s.out, s.dtype, first, s.n, out);
  }
}

inline void decode_range(const Derivative& s, int64_t begin, int64_t end) {
  with_bits(s.bits, [&](auto bits) { decode_blocks<bits>(s, begin, end); });
}

#endif

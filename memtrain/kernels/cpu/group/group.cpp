// Min/max group quantisation (definition: kernels/group/group.py).
#ifndef MT_LANES
#define MT_SELF "group/group.cpp"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "floats/runs.h"

namespace memtrain {

struct Quantizer {
  uint8_t* codes;
  uint16_t* bounds;
  int64_t bits, size, seed, stochastic;
};

// Groups that are worked on together: what is read again is still in the nearest cache. An even
// number, since two groups share their draws.
inline int64_t groups_together(int64_t size) {
  return std::max<int64_t>(4096 / size / 2 * 2, 2);
}

// Room for such groups, and for what vectors reach past their ends; in whole cache lines.
class Scratch {
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> words_, numbers_, bytes_;

 public:
  const int64_t stride;  // from one of a draw's four words to the next
  explicit Scratch(int64_t size)
      : words_((groups_together(size) / 2 + 1) * (size / 8) / 4 + 8),
        numbers_(groups_together(size) * size / 16 + 2),
        bytes_(size / 64 + 2),
        stride(static_cast<int64_t>(words_.size()) / 4 * 16) {}
  int32_t* words() { return reinterpret_cast<int32_t*>(words_.data()); }
  float* numbers() { return reinterpret_cast<float*>(numbers_.data()); }
  uint8_t* bytes() { return bytes_.data()->bytes; }
};

constexpr float kLimit = 3.3895313892515355e38f, kTiny = 0x1p-101f;

// To bf16, never into the range of the group: `up` towards +inf, else towards -inf. Adding 0x10000 to
// the bits enlarges the magnitude of either sign.
MT_INLINE float outward(float x, bool up) {
  const uint32_t b = bits_of(x);
  const bool enlarge = (b & 0xFFFF) != 0 && ((b >> 31) == 0) == up;
  x = float_of((b & 0xFFFF0000u) + (enlarge ? 0x10000u : 0u));
  x = x > kLimit ? kLimit : (x < -kLimit ? -kLimit : x);
  return x + 0.0f;  // -0 becomes 0: which zero a minimum finds depends on the order
}

struct Bounds {
  float lo, hi;
  float half_step(int64_t bits) const {
    float half = 0.5f * hi - 0.5f * lo;
    return half < kTiny ? 0.0f : half / static_cast<float>((1 << bits) - 1);  // NaN stays NaN
  }
};

// The bounds of finite numbers where not all are: rare, so one by one.
static Bounds finite_bounds(const float* x, int64_t n) {
  float lo = INFINITY, hi = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) continue;
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  if (lo > hi) return {float_of(0x7FC00000), float_of(0x7FC00000)};
  return {outward(lo, false), outward(hi, true)};
}

// A tensor of float or bf16, and its codes; the order is that of `_run_cpp` in group.py.
struct Job {
  void* x;
  int64_t bf16, n;
  Quantizer codes;
  int64_t columns, stride;  // of rows with gaps between them; else 0
  int64_t threads;
};

}  // namespace memtrain

#include "foreach_isa.h"

namespace memtrain {

static void quantize_tile(const float* x, int64_t first, int64_t count, const Quantizer& to,
                          Scratch& scratch, int64_t left) {
  MT_DISPATCH(quantize_tile(x, first, count, to, scratch, left));
}

static void quantize_range(const Job& job, int64_t begin, int64_t end, Scratch& scratch) {
  const int64_t size = job.codes.size, together = groups_together(size);
  for (int64_t g = begin, count; g < end; g += count) {
    count = std::min(together - (g & 1), end - g);
    const int64_t at = g * size, n = std::min(count * size, job.n - at);
    const float* x = static_cast<const float*>(job.x) + at;
    // Read where it lies, where no vector reaches past a slice.
    if (job.bf16 || job.columns || n < count * size || size < 128) {
      float* room = scratch.numbers();
      MT_DISPATCH(read(job, at, n, room));
      for (int64_t i = n; i < count * size; ++i) room[i] = -INFINITY;  // whose code is 0
      x = room;
    }
    quantize_tile(x, g, count, job.codes, scratch, n);
  }
}

static void dequantize_range(const Job& job, int64_t begin, int64_t end, Scratch& scratch) {
  MT_DISPATCH(dequantize_range(job, begin, end, scratch));
}

template <typename Range>
static void over_groups(const Job& job, const Range& range) {
  const int64_t size = job.codes.size, groups = (job.n + size - 1) / size;
  parallel_for(groups, std::max<int64_t>(32768 / size, 1), job.threads,
               [&](int64_t begin, int64_t end) {
                 Scratch scratch(size);
                 range(job, begin, end, scratch);
               });
}

}  // namespace memtrain

MT_EXPORT void mt_group_quantize(const memtrain::Job* job) {
  memtrain::over_groups(*job, memtrain::quantize_range);
}

MT_EXPORT void mt_group_dequantize(const memtrain::Job* job) {
  memtrain::over_groups(*job, memtrain::dequantize_range);
}

#else

#include "packing/slices.h"
#include "random/philox.h"

// `count` elements from number `first` on.
inline void read(const Job& job, int64_t first, int64_t count, float* to) {
  const int64_t columns = job.columns ? job.columns : job.n, stride = job.columns ? job.stride : 0;
  while (count > 0) {
    const int64_t column = first % columns, taken = std::min(columns - column, count);
    const int64_t at = first / columns * stride + column;
    read_floats(job.x, job.bf16 ? kBfloat16 : kFloat32, at, taken, to);
    to += taken, first += taken, count -= taken;
  }
}

// Of `n` numbers.
MT_HELPER Bounds bounds_of(const float* x, int64_t n) {
  float lo = x[0], hi = x[0];
  int32_t top = 0;
  const int64_t whole = n / 16 * 16;
  if (whole) {
    F least = load(x), most = least;
    I tops = magnitude(least);
    for (int64_t i = 16; i < whole; i += 16) {
      const F v = load(x + i);
      least = lesser(v, least), most = greater(v, most), tops = imax(tops, magnitude(v));
    }
    lo = least_of(least), hi = greatest_of(most), top = top_of(tops);
  }
  for (int64_t i = whole; i < n; ++i) {
    const int32_t m = static_cast<int32_t>(bits_of(x[i]) & 0x7FFFFFFF);
    lo = x[i] < lo ? x[i] : lo, hi = x[i] > hi ? x[i] : hi, top = m > top ? m : top;
  }
  if (top >= 0x7F800000) return finite_bounds(x, n);  // an Inf or a NaN
  return {outward(lo, false), outward(hi, true)};
}

// A group's codes; `words` are its draws, whose bits the second group of a pair turns by 8.
template <int kBits, bool kStochastic>
MT_HELPER void encode_group(const float* x, uint8_t* out, int64_t width, const int32_t* words,
                            int64_t stride, bool odd, float base, float inverse) {
  const F half = splat(0.5f), from = splat(base), by = splat(inverse), zero = splat(0.0f);
  const F most = splat(static_cast<float>((1 << kBits) - 1));
  for (int64_t c = 0; c < width; c = next(c, width)) {
    I draws[4], codes[8];
    if (kStochastic)
      MT_UNROLL(4)
      for (int j = 0; j < 4; ++j) {
        const I word = load(words + j * stride + c);
        draws[j] = odd ? ((word >> 8) & 0xFFFFFF) | word << 24 : word;
      }
    MT_UNROLL(8)
    for (int s = 0; s < 8; ++s) {
      const F u = kStochastic ? uniform(draws, s) : half;
      const F t = (load(x + s * width + c) * half - from) * by + u;
      codes[s] = to_int(lesser(greater(t, zero), most));  // 0 for NaN
    }
    store_codes<kBits>(out + c, codes, width);
  }
}

template <int kBits>
inline void quantize_groups_of(const float* x, int64_t first, int64_t count, const Quantizer& to,
                               Scratch& scratch, int64_t left) {
  const int64_t size = to.size, width = size / 8, bytes = width * kBits;
  for (int64_t g = first; g < first + count; ++g, x += size, left -= size) {
    const Bounds b = bounds_of(x, std::min(left, size));
    to.bounds[2 * g] = bits_of(b.lo) >> 16, to.bounds[2 * g + 1] = bits_of(b.hi) >> 16;
    const float step = b.half_step(kBits), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    uint8_t* out = to.codes + g * bytes;
    uint8_t* made = width < 16 ? scratch.bytes() : out;
    const int32_t* words = scratch.words() + (g / 2 - first / 2) * width;
    (to.stochastic ? encode_group<kBits, true> : encode_group<kBits, false>)(
        x, made, width, words, scratch.stride, g & 1, 0.5f * b.lo, inverse);
    if (made != out) std::memcpy(out, made, bytes);
  }
}

// `x` has `left` numbers, and what fills its last group up.
inline void quantize_tile(const float* x, int64_t first, int64_t count, const Quantizer& to,
                          Scratch& scratch, int64_t left) {
  const int64_t width = to.size / 8;
  const int64_t from = first / 2 * width, draws = ((first + count + 1) / 2 - first / 2) * width;
  if (to.stochastic)
    for (int64_t i = 0; i < draws; i += 16) {
      I words[4];
      draw(static_cast<uint32_t>(from + i), static_cast<uint64_t>(to.seed), words);
      for (int j = 0; j < 4; ++j) store(scratch.words() + j * scratch.stride + i, words[j]);
    }
  with_bits(to.bits, [&](auto bits) {
    quantize_groups_of<bits>(x, first, count, to, scratch, left);
  });
}

MT_INLINE void put(float* out, F x) { store(out, x); }
MT_INLINE void put(uint16_t* out, F x) { store_bfloat(out, x); }

template <int kBits, typename T>
MT_HELPER void decode_group(const uint8_t* in, T* out, int64_t width, float base, float step) {
  const auto level = [&](I code) __attribute__((always_inline)) {
    return splat(2.0f) * (splat(base) + to_float(code) * splat(step));
  };
  const F table = level(lane_numbers());
  for (int64_t c = 0; c < width; c = next(c, width)) {
    I codes[8];
    load_codes<kBits>(in + c, codes, width);
    MT_UNROLL(8)
    for (int s = 0; s < 8; ++s)
      put(out + s * width + c, kBits <= 4 ? decode(table, codes[s]) : level(codes[s]));
  }
}

template <int kBits, typename T>
inline void dequantize_groups_of(const Job& job, int64_t begin, int64_t end, Scratch& scratch) {
  const int64_t size = job.codes.size, width = size / 8, bytes = width * kBits;
  T* room = reinterpret_cast<T*>(scratch.numbers());
  for (int64_t g = begin; g < end; ++g) {
    const uint16_t* ends = job.codes.bounds + 2 * g;
    const Bounds b{from_bfloat(ends[0]), from_bfloat(ends[1])};
    const int64_t n = std::min(size, job.n - g * size);
    const uint8_t* in = job.codes.codes + g * bytes;
    T* out = static_cast<T*>(job.x) + g * size;
    // Vectors reach past a slice, and past the last group.
    if (width < 16) in = static_cast<uint8_t*>(std::memcpy(scratch.bytes(), in, bytes));
    T* made = width < 16 || n < size ? room : out;
    decode_group<kBits>(in, made, width, 0.5f * b.lo, b.half_step(kBits));
    if (made != out) std::memcpy(out, made, n * sizeof(T));
  }
}

inline void dequantize_range(const Job& job, int64_t begin, int64_t end, Scratch& scratch) {
  with_bits(job.codes.bits, [&](auto bits) {
    job.bf16 ? dequantize_groups_of<bits, uint16_t>(job, begin, end, scratch)
             : dequantize_groups_of<bits, float>(job, begin, end, scratch);
  });
}

#endif

// Min/max group quantisation (definition: kernels/group/group.py, layout of codes: kernels/packing/bits.py).
#include <cmath>
#include <cstring>

#include "group/group_avx512.h"
#include "group/tiles.h"
#include "halves.h"
#include "packing/codes.h"
#include "philox.h"

namespace memtrain {

constexpr int64_t kPiece = 32;  // running minima and maxima, which GCC keeps in vectors
constexpr float kLimit = 3.3895313892515355e38f, kTiny = 0x1p-101f;

// To bf16 away from the group's inside: `up` towards +inf, else towards -inf. Adding 0x10000 to
// the bits enlarges the magnitude of either sign.
MT_INLINE float outward(float x, bool up, bool wide) {
  uint32_t b = bits_of(x);
  if (!wide) {
    bool enlarge = (b & 0xFFFF) != 0 && ((b >> 31) == 0) == up;
    x = float_of((b & 0xFFFF0000u) + (enlarge ? 0x10000u : 0u));
  }
  x = x > kLimit ? kLimit : (x < -kLimit ? -kLimit : x);
  return x + 0.0f;  // -0 becomes 0: which zero a minimum finds depends on the order
}

struct Group {
  float lo, hi;
  float half_step(float levels) const {
    float half = 0.5f * hi - 0.5f * lo;
    return half < kTiny ? 0.0f : half / levels;  // NaN stays NaN
  }
};

// The same of a group's finite numbers, where not all are: rare, so one by one.
static Group finite_bounds(const float* x, int64_t size, bool wide) {
  float lo = INFINITY, hi = -INFINITY;
  for (int64_t i = 0; i < size; ++i) {
    if (!std::isfinite(x[i])) continue;
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  if (lo > hi) return {float_of(0x7FC00000), float_of(0x7FC00000)};
  return {outward(lo, false, wide), outward(hi, true, wide)};
}

MT_INLINE Group bounds_of(const float* x, int64_t size, bool wide) {
  float lo = x[0], hi = x[0];
  uint32_t top = 0;  // greatest magnitude as bits: above 0x7F7FFFFF there is an Inf or a NaN
  int64_t whole = size / kPiece * kPiece;
  if (whole) {
    float los[kPiece], his[kPiece];
    uint32_t tops[kPiece];
    for (int c = 0; c < kPiece; ++c) los[c] = his[c] = x[c], tops[c] = bits_of(x[c]) & 0x7FFFFFFF;
    for (int64_t i = kPiece; i < whole; i += kPiece)
      for (int c = 0; c < kPiece; ++c) {
        float v = x[i + c];
        uint32_t m = bits_of(v) & 0x7FFFFFFF;
        los[c] = v < los[c] ? v : los[c];
        his[c] = v > his[c] ? v : his[c];
        tops[c] = m > tops[c] ? m : tops[c];
      }
    for (int c = 0; c < 16; ++c) {
      los[c] = los[c + 16] < los[c] ? los[c + 16] : los[c];
      his[c] = his[c + 16] > his[c] ? his[c + 16] : his[c];
    }
    for (int c = 0; c < 16; ++c) {
      lo = los[c] < lo ? los[c] : lo;
      hi = his[c] > hi ? his[c] : hi;
    }
    for (int c = 0; c < kPiece; ++c) top = tops[c] > top ? tops[c] : top;
  }
  for (int64_t i = whole; i < size; ++i) {
    uint32_t m = bits_of(x[i]) & 0x7FFFFFFF;
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
    top = m > top ? m : top;
  }
  if (top >= 0x7F800000) return finite_bounds(x, size, wide);
  return {outward(lo, false, wide), outward(hi, true, wide)};
}

struct Encoder {
  float base, inverse, levels;
  uint64_t seed;
  bool stochastic;
};

MT_INLINE uint8_t encode_one(float x, float u, const Encoder& e) {
  float t = (0.5f * x - e.base) * e.inverse + u;
  t = t > 0.0f ? t : 0.0f;  // 0 for NaN
  t = t < e.levels ? t : e.levels;
  return static_cast<uint8_t>(static_cast<int32_t>(t));
}

// Codes of group `g`, a byte each, N positions of all slices at a time: eight slices of two groups
// share their counters (kernels/random/philox.py).
template <int N>
MT_INLINE void encode(const float* __restrict x, uint8_t* __restrict codes, int64_t size,
                      int64_t g, const Encoder e) {
  const uint32_t first = static_cast<uint32_t>(g / 2 * (size / 8));
  const int turn = g % 2 ? 8 : 0;
  const int64_t width = size / 8;
  uint32_t words[4][N];
  float u[N];
  for (int i = 0; i < N; ++i) u[i] = 0.5f;
  for (int64_t c = 0; c < width; c += N) {
    if (e.stochastic) philox_piece<N>(first + static_cast<uint32_t>(c), e.seed, words);
    for (int s = 0; s < 8; ++s) {
      if (e.stochastic)
        MT_LOOP for (int i = 0; i < N; ++i) {
          const uint32_t word = words[s / 2][i];
          const uint32_t turned = word >> turn | word << ((32 - turn) & 31);
          const uint32_t r = (turned >> (s % 2 * 16)) & 0xFFFF;
          u[i] = (static_cast<float>(static_cast<int32_t>(r)) + 0.5f) * 0x1p-16f;
        }
      const float* from = x + s * width + c;
      uint8_t* to = codes + s * width + c;
      if (width - c >= N)
        MT_LOOP for (int i = 0; i < N; ++i) to[i] = encode_one(from[i], u[i], e);
      else
        for (int i = 0; i < width - c; ++i) to[i] = encode_one(from[i], u[i], e);
    }
  }
}

// N positions of byte K of the packed words, and of the bytes after it.
template <int BITS, int N, int K = 0>
MT_INLINE void pack(const uint8_t* __restrict codes, uint8_t* __restrict out, int64_t width) {
  constexpr int kLanes = lanes_of(BITS), kBytes = kLanes * BITS / 8;
  constexpr int kFirst = 8 * K / BITS;  // the first lane with a bit in this byte
  for (int i = 0; i < N; ++i) {
    uint32_t byte = static_cast<uint32_t>(codes[kFirst * width + i]) >> (8 * K - kFirst * BITS);
    for (int l = kFirst + 1; l < kLanes && l * BITS < 8 * K + 8; ++l)
      byte |= static_cast<uint32_t>(codes[l * width + i]) << (l * BITS - 8 * K);
    out[K * width + i] = static_cast<uint8_t>(byte);
  }
  if constexpr (K + 1 < kBytes) pack<BITS, N, K + 1>(codes, out, width);
}

template <int BITS>
MT_INLINE void pack_group(const uint8_t* codes, uint8_t* out, int64_t size) {
  const int64_t width = size / lanes_of(BITS);
  int64_t p = 0;
  for (; p + 16 <= width; p += 16) pack<BITS, 16>(codes + p, out + p, width);
  for (; p < width; ++p) pack<BITS, 1>(codes + p, out + p, width);
}

// N positions of lane L, and of the lanes after it.
template <int BITS, int N, int L = 0>
MT_INLINE void decode(const uint8_t* __restrict in, float* __restrict out, int64_t width,
                      float base, float step) {
  constexpr int kShift = L * BITS % 8;
  constexpr bool kTwo = kShift + BITS > 8;  // the code lies in two bytes
  const uint8_t* low = in + L * BITS / 8 * width;
  for (int i = 0; i < N; ++i) {
    uint32_t word = low[i];
    if (kTwo) word |= static_cast<uint32_t>(low[width + i]) << 8;
    word = (word >> kShift) & ((1u << BITS) - 1);
    out[L * width + i] = 2.0f * (base + static_cast<float>(static_cast<int32_t>(word)) * step);
  }
  if constexpr (L + 1 < lanes_of(BITS)) decode<BITS, N, L + 1>(in, out, width, base, step);
}

template <int BITS>
MT_INLINE void decode_group(const uint8_t* in, float* out, int64_t size, float base, float step) {
  const int64_t width = size / lanes_of(BITS);
  int64_t p = 0;
  for (; p + 16 <= width; p += 16) decode<BITS, 16>(in + p, out + p, width, base, step);
  for (; p < width; ++p) decode<BITS, 1>(in + p, out + p, width, base, step);
}

struct Job {
  const void* x;  // float or bf16: what is quantised
  void* y;        // float or bf16: where it is decoded to
  uint8_t* codes;
  void* bounds;
  bool bf16, wide, stochastic;
  int64_t n, bits, size;
  uint64_t seed;
};

MT_INLINE void widen(const uint16_t* __restrict x, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from_bfloat(x[i]);
}

// The group as `size` floats; what is missing in the last one repeats its first element.
MT_INLINE const float* load_group(const Job& job, int64_t g, float* buffer) {
  const int64_t at = g * job.size, left = job.n - at, n = left < job.size ? left : job.size;
  if (!job.bf16 && n == job.size) return static_cast<const float*>(job.x) + at;
  if (job.bf16)
    widen(static_cast<const uint16_t*>(job.x) + at, buffer, n);
  else
    std::memcpy(buffer, static_cast<const float*>(job.x) + at, n * sizeof(float));
  for (int64_t i = n; i < job.size; ++i) buffer[i] = buffer[0];
  return buffer;
}

MT_INLINE void store_bounds(const Job& job, int64_t g, Group b) {
  if (job.wide) {
    float* to = static_cast<float*>(job.bounds) + 2 * g;
    to[0] = b.lo, to[1] = b.hi;
  } else {
    uint16_t* to = static_cast<uint16_t*>(job.bounds) + 2 * g;
    to[0] = bits_of(b.lo) >> 16, to[1] = bits_of(b.hi) >> 16;
  }
}

MT_INLINE Group load_bounds(const Job& job, int64_t g) {
  if (job.wide) {
    const float* from = static_cast<const float*>(job.bounds) + 2 * g;
    return {from[0], from[1]};
  }
  const uint16_t* from = static_cast<const uint16_t*>(job.bounds) + 2 * g;
  return {from_bfloat(from[0]), from_bfloat(from[1])};
}

#ifdef MT_X86
// All groups but a last one that is not whole; returns where the rest begins.
static int64_t quantize_whole(const Job& job, int64_t begin, int64_t end) {
  end = std::min(end, job.n / job.size);
  const avx512::Encoding e{avx512::keys_of(job.seed), job.stochastic, 0};
  const auto go = [&](auto type) {
    using F = decltype(type);
    avx512::encode_any<F>(static_cast<const typename F::T*>(job.x), job.codes, job.bounds, job.wide,
                          job.size, job.bits, begin, end, e);
  };
  job.bf16 ? go(avx512::Bfloats()) : go(avx512::Floats());
  return std::max(begin, end);
}
#endif

MT_CLONES static void quantize_range(const Job& job, int64_t begin, int64_t end, float* buffer,
                                     uint8_t* codes) {
  const int64_t size = job.size, bits = job.bits;
  const float levels = static_cast<float>((1 << bits) - 1);
#ifdef MT_X86
  if (avx512::can_encode(bits)) begin = quantize_whole(job, begin, end);
#endif
  for (int64_t g = begin; g < end; ++g) {
    const float* x = load_group(job, g, buffer);
    const Group b = size == 256 ? bounds_of(x, 256, job.wide) : bounds_of(x, size, job.wide);
    store_bounds(job, g, b);
    const float step = b.half_step(levels);
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    const Encoder e{0.5f * b.lo, inverse, levels, job.seed, job.stochastic};
    uint8_t* out = job.codes + g * (size / 8 * bits);
    if (size % 256 == 0)
      encode<32>(x, codes, size, g, e);
    else if (size % 128 == 0)
      encode<16>(x, codes, size, g, e);
    else
      encode<8>(x, codes, size, g, e);
    const int64_t left = job.n - g * size;
    if (left < size) std::memset(codes + left, 0, size - left);
#define MT_PACK(B) pack_group<B>(codes, out, size)
    MT_BITS_SWITCH(MT_PACK)
  }
}

#ifdef MT_X86
// All short groups but a last one that is not whole; returns where the rest begins.
static int64_t dequantize_short(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 512;
  const int64_t size = job.size, bits = job.bits;
  const float levels = static_cast<float>((1 << bits) - 1);
  float base[kBlock], step[kBlock];
  end = std::max(begin, std::min(end, job.n / size));
  for (int64_t g = begin; g < end; g += kBlock) {
    const int64_t count = std::min(kBlock, end - g);
    for (int64_t k = 0; k < count; ++k) {
      const Group b = load_bounds(job, g + k);
      base[k] = 0.5f * b.lo, step[k] = b.half_step(levels);
    }
    const uint8_t* in = job.codes + g * (size / 8 * bits);
    if (job.bf16)
      avx512::decode_short(in, static_cast<uint16_t*>(job.y) + g * size, size, bits, count, base,
                           step);
    else
      avx512::decode_short(in, static_cast<float*>(job.y) + g * size, size, bits, count, base,
                           step);
  }
  return end;
}
#endif

MT_INLINE void narrow(const float* __restrict x, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat(x[i]);
}

MT_CLONES static void dequantize_range(const Job& job, int64_t begin, int64_t end, float* buffer,
                                       uint8_t*) {
  const int64_t size = job.size, bits = job.bits;
  const float levels = static_cast<float>((1 << bits) - 1);
#ifdef MT_X86
  const bool fast = avx512::can_decode(bits);
  if (fast && size <= avx512::kShort) begin = dequantize_short(job, begin, end);
#endif
  for (int64_t g = begin; g < end; ++g) {
    const Group b = load_bounds(job, g);
    const float base = 0.5f * b.lo, step = b.half_step(levels);
    const uint8_t* in = job.codes + g * (size / 8 * bits);
    const int64_t at = g * size, n = std::min(job.n - at, size);
    float* to = static_cast<float*>(job.y) + at;
#ifdef MT_X86
    if (n == size && fast) {
      if (job.bf16)
        avx512::decode_bfloats(in, static_cast<uint16_t*>(job.y) + at, size, bits, base, step);
      else
        avx512::decode_floats(in, to, size, bits, base, step);
      continue;
    }
#endif
    float* out = job.bf16 || n < size ? buffer : to;
#define MT_DECODE(B) decode_group<B>(in, out, size, base, step)
    MT_BITS_SWITCH(MT_DECODE)
    if (job.bf16)
      narrow(buffer, static_cast<uint16_t*>(job.y) + at, n);
    else if (n < size)
      std::memcpy(to, buffer, n * sizeof(float));
  }
}

template <typename Range>
void over_groups(const Job& job, int64_t threads, const Range& range) {
  const int64_t groups = (job.n + job.size - 1) / job.size;
  parallel_for(groups, std::max<int64_t>(32768 / job.size, 1), threads,
               [&](int64_t begin, int64_t end) {
                 std::vector<float> buffer(job.size);
                 std::vector<uint8_t> codes(job.size);
                 range(job, begin, end, buffer.data(), codes.data());
               });
}

// Elements `first` to `first + count` of a matrix of rows that begin `stride` elements apart.
static void gather(const Job& job, int64_t columns, int64_t stride, int64_t first, int64_t count,
                   uint8_t* to) {
  const int64_t bytes = job.bf16 ? 2 : 4;
  const auto* x = static_cast<const uint8_t*>(job.x);
  while (count > 0) {
    const int64_t column = first % columns, taken = std::min(columns - column, count);
    std::memcpy(to, x + (first / columns * stride + column) * bytes, taken * bytes);
    to += taken * bytes, first += taken, count -= taken;
  }
}

// As `quantize_range` of such a matrix, which is never there as a whole without its gaps.
static void quantize_rows(const Job& job, int64_t columns, int64_t stride, int64_t begin,
                          int64_t end, float* buffer, uint8_t* codes) {
  const int64_t bytes = job.bf16 ? 2 : 4, together = std::max<int64_t>(8192 / job.size, 2) & ~1;
  std::vector<uint8_t> held(std::min(together, end - begin) * job.size * bytes);
  for (int64_t g = begin; g < end; g += together) {
    const int64_t last = std::min(g + together, end), first = g * job.size;
    Job part = job;
    part.n = std::min(last * job.size, job.n);
    gather(job, columns, stride, first, part.n - first, held.data());
    const uintptr_t before = static_cast<uintptr_t>(first * bytes);
    part.x = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(held.data()) - before);
    quantize_range(part, g, last, buffer, codes);
  }
}

void quantize_tile(const float* x, int64_t begin, int64_t n, const Quantizer& to, float* buffer,
                   uint8_t* scratch) {
  const uintptr_t before = static_cast<uintptr_t>(begin * to.size) * sizeof(float);
  const Job job{reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) - before), nullptr,
                to.codes, to.bounds, false, to.wide != 0, to.stochastic != 0, begin * to.size + n,
                to.bits, to.size, static_cast<uint64_t>(to.seed)};
  quantize_range(job, begin, begin + (n + to.size - 1) / to.size, buffer, scratch);
}

void quantize_groups(const float* x, int64_t begin, int64_t end, const Quantizer& to,
                     uint8_t* scratch) {
  quantize_tile(x, begin, (end - begin) * to.size, to, nullptr, scratch);
}

void dequantize_tile(const Quantizer& from, int64_t begin, int64_t end, float* out) {
  const uintptr_t before = static_cast<uintptr_t>(begin * from.size) * sizeof(float);
  const Job job{nullptr, reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) - before),
                from.codes, from.bounds, false, from.wide != 0, false, end * from.size,
                from.bits, from.size, 0};
  dequantize_range(job, begin, end, nullptr, nullptr);
}

}  // namespace memtrain

MT_EXPORT void mt_group_quantize(const void* x, int64_t bf16, uint8_t* codes, void* bounds,
                                 int64_t wide, int64_t n, int64_t bits, int64_t group_size,
                                 int64_t seed, int64_t stochastic, int64_t threads) {
  memtrain::Job job{x, nullptr, codes, bounds, bf16 != 0, wide != 0, stochastic != 0,
                    n, bits, group_size, static_cast<uint64_t>(seed)};
  memtrain::over_groups(job, threads, memtrain::quantize_range);
}

// As `mt_group_quantize` of a matrix of `columns` columns whose rows begin `stride` elements apart.
MT_EXPORT void mt_group_quantize_rows(const void* x, int64_t bf16, uint8_t* codes, void* bounds,
                                      int64_t wide, int64_t n, int64_t bits, int64_t group_size,
                                      int64_t seed, int64_t stochastic, int64_t columns,
                                      int64_t stride, int64_t threads) {
  memtrain::Job job{x, nullptr, codes, bounds, bf16 != 0, wide != 0, stochastic != 0,
                    n, bits, group_size, static_cast<uint64_t>(seed)};
  memtrain::over_groups(job, threads, [&](const memtrain::Job& all, auto... range) {
    memtrain::quantize_rows(all, columns, stride, range...);
  });
}

MT_EXPORT void mt_group_dequantize(const uint8_t* codes, const void* bounds, int64_t wide,
                                   void* out, int64_t bf16, int64_t n, int64_t bits,
                                   int64_t group_size, int64_t threads) {
  memtrain::Job job{nullptr, out, const_cast<uint8_t*>(codes), const_cast<void*>(bounds),
                    bf16 != 0, wide != 0, false, n, bits, group_size, 0};
  memtrain::over_groups(job, threads, memtrain::dequantize_range);
}

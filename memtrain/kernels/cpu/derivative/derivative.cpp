// Few-bit derivative codes (contract: kernels/derivative/derivative.py; layout: kernels/packing/bits.py).
//
// Codes of one bit go in one pass (one_bit.h), those of two to four in another where there
// is AVX-512. All else: blocks are worked on a few at a time, to float, to the side of the
// boundaries, to codes; each step is a plain loop over numbers that stay in the first cache, so that
// dtypes, functions and widths do not multiply.
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "derivative/derivative_avx512.h"
#include "derivative/one_bit.h"
#include "derivative/exponential.h"
#include "halves.h"

namespace memtrain {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kChunk = 8;    // blocks at a time: 8 KiB of floats
constexpr int64_t kGrain = 128;  // a thread's piece in blocks: some 10 us
constexpr int64_t kLarge = 262144;  // elements from which on steps count more than a core's clock

constexpr int64_t kFloat64 = 3;  // after the types of halves.h
enum Parity : int64_t { kPlain, kEven, kBand };
enum Function : int64_t { kNone, kRelu, kLeakyRelu, kHardtanh, kSilu };

MT_INLINE float value_of(uint32_t bits) { return float_of(bits); }
MT_INLINE double value_of(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

struct Bf16 { uint16_t bits; };
struct Half { uint16_t bits; };

MT_INLINE float load(float x) { return x; }
MT_INLINE float load(double x) { return static_cast<float>(x); }
MT_INLINE float load(Bf16 x) { return from_bfloat(x.bits); }
MT_INLINE float load(Half x) { return from_half(x.bits); }

template <typename T>
MT_INLINE float wide(T x) { return load(x); }
MT_INLINE double wide(double x) { return x; }

MT_INLINE void store(float x, float& out) { out = x; }
MT_INLINE void store(double x, double& out) { out = x; }
MT_INLINE void store(float x, Bf16& out) { out.bits = to_bfloat(x); }
MT_INLINE void store(float x, Half& out) { out.bits = to_half(x); }

// -- to float and back ---------------------------------------------------------------------------

#define MT_WIDEN(T)                                                  \
  MT_CLONES void widen(const T* x, float* out, int64_t n) {          \
    for (int64_t i = 0; i < n; ++i) out[i] = load(x[i]);             \
  }
#define MT_NARROW(T)                                                 \
  MT_CLONES void narrow(const float* x, T* out, int64_t n) {         \
    for (int64_t i = 0; i < n; ++i) store(x[i], out[i]);             \
  }
// `level` holds the bit patterns of floats (of doubles for doubles). `out` may be `grad`: each
// element is read before it is written.
#define MT_MULTIPLY(T, Bits)                                                       \
  MT_CLONES void multiply(const T* grad, const Bits* level, T* out, int64_t n) {   \
    if (grad == nullptr)                                                           \
      for (int64_t i = 0; i < n; ++i) store(value_of(level[i]), out[i]);           \
    else                                                                           \
      _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i)                         \
        store(wide(grad[i]) * value_of(level[i]), out[i]);                         \
  }

MT_WIDEN(double)
MT_WIDEN(Bf16)
MT_WIDEN(Half)
MT_NARROW(Bf16)
MT_NARROW(Half)
MT_MULTIPLY(float, uint32_t)
MT_MULTIPLY(double, uint64_t)
MT_MULTIPLY(Bf16, uint32_t)
MT_MULTIPLY(Half, uint32_t)

// -- values --------------------------------------------------------------------------------------

// x / (1 + exp(-x)), bit for bit as torch's vector code. Limits on -x: beyond them exp adds nothing
// to 1, or is infinite.
MT_INLINE float silu(float x) {
  float d = -x;
  d = d < -87.0f ? -87.0f : d;
  d = d > 89.0f ? 89.0f : d;
  const float q = __builtin_rintf(d * exponential::kInverseLog2);
  float s = __builtin_fmaf(q, -exponential::kLog2High, d);
  s = __builtin_fmaf(q, -exponential::kLog2Low, s);
  float u = exponential::kTerms[0];
#pragma GCC unroll 5
  for (int k = 1; k < exponential::kCount; ++k) u = __builtin_fmaf(u, s, exponential::kTerms[k]);
  u = 1.0f + __builtin_fmaf(s * s, u, s);
  // Half of 2**q, for 2**128 is no float; a NaN's q counts for nothing.
  const int32_t exponent = x != x ? 0 : static_cast<int32_t>(q);
  const float scale = float_of(static_cast<uint32_t>(exponent + 126) << 23);
  return x / (1.0f + 2.0f * u * scale);
}

// NaN passes, as in torch; which zero a zero becomes does not matter.
MT_CLONES void apply(const float* x, float* y, int64_t n, int64_t function, float a, float b) {
  if (function == kRelu)
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] <= 0.0f ? 0.0f : x[i];
  if (function == kLeakyRelu)
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] > 0.0f ? x[i] : x[i] * a;
  if (function == kHardtanh)
    for (int64_t i = 0; i < n; ++i) {
      const float low = x[i] < a ? a : x[i];
      y[i] = low > b ? b : low;
    }
  if (function == kSilu)
    for (int64_t i = 0; i < n; ++i) y[i] = silu(x[i]);
}

// -- codes ---------------------------------------------------------------------------------------

// Lanes of a block, positions of a lane, bytes of a position's word.
template <int kBits>
struct Layout {
  static constexpr int lanes = lanes_of(kBits);
  static constexpr int width = kBlock / lanes;
  static constexpr int bytes = lanes * kBits / 8;
  static constexpr int levels = 1 << kBits;
  using Word = std::conditional_t<(bytes > 4), uint64_t, uint32_t>;
};

template <int kBits>
using Lanes = std::make_index_sequence<Layout<kBits>::lanes>;
template <int kBits>
using Bytes = std::make_index_sequence<Layout<kBits>::bytes>;

// Loops over boundaries and lanes are folds, so that one plain loop over positions is left, which
// the compiler vectorises.
template <size_t... kIndex>
MT_INLINE uint32_t count_below(float v, const float* boundary, std::index_sequence<kIndex...>) {
  return (0u + ... + (v > boundary[kIndex] ? 1u : 0u));
}

template <int kBits, bool kInBand>
MT_INLINE uint32_t code_of(float v, const float* boundary) {
  if constexpr (kInBand)
    return (v > boundary[0] ? 1u : 0u) & (v <= boundary[1] ? 1u : 0u);
  else
    return count_below(v, boundary, std::make_index_sequence<Layout<kBits>::levels - 1>());
}

template <int kBits, bool kInBand, size_t... kLane, size_t... kByte>
MT_INLINE void encode_block(const float* x, const float* boundary, uint8_t* out,
                            std::index_sequence<kLane...>, std::index_sequence<kByte...>) {
  constexpr int width = Layout<kBits>::width;
  // Two loops: with the bytes stored in the first, the compiler would take 64 lanes and spill.
  uint32_t word[width];
  for (int c = 0; c < width; ++c)
    word[c] =
        (0u | ... | (code_of<kBits, kInBand>(x[kLane * width + c], boundary) << (kBits * kLane)));
  for (int c = 0; c < width; ++c)
    ((out[kByte * width + c] = static_cast<uint8_t>(word[c] >> (8 * kByte))), ...);
}

template <int kStep>
MT_INLINE int32_t halve(float v, const float* boundary, int32_t at) {
  if constexpr (kStep == 0) {
    return at;
  } else {
    at += v > boundary[at + kStep - 1] ? kStep : 0;
    return halve<kStep / 2>(v, boundary, at);
  }
}

// Four bits by compares against every 2**(bits - 4)-th boundary, the rest by halving what is left.
template <int kBits, size_t... kTop>
MT_INLINE void search(const float* x, const float* boundary, int32_t* code,
                      std::index_sequence<kTop...>) {
  constexpr int kRest = kBits - 4;
  float top[15];
  for (int k = 0; k < 15; ++k) top[k] = boundary[((k + 1) << kRest) - 1];
  for (int i = 0; i < kBlock; ++i) {
    const int32_t at = (0 + ... + (x[i] > top[kTop] ? 1 : 0)) << kRest;
    code[i] = halve<1 << (kRest - 1)>(x[i], boundary, at);
  }
}

template <int kBits, size_t... kLane, size_t... kByte>
MT_INLINE void encode_wide_block(const float* x, const float* boundary, uint8_t* out,
                                 std::index_sequence<kLane...>, std::index_sequence<kByte...>) {
  constexpr int width = Layout<kBits>::width;
  using Word = typename Layout<kBits>::Word;
  int32_t code[kBlock];
  search<kBits>(x, boundary, code, std::make_index_sequence<15>());
  for (int c = 0; c < width; ++c) {
    const Word word =
        (Word{0} | ... | (static_cast<Word>(code[kLane * width + c]) << (kBits * kLane)));
    ((out[kByte * width + c] = static_cast<uint8_t>(word >> (8 * kByte))), ...);
  }
}

template <int kBits, bool kInBand = false>
MT_INLINE void encode_blocks(const float* x, const float* boundaries, uint8_t* out, int64_t blocks) {
  float boundary[Layout<kBits>::levels];  // a local copy: `out` could alias the argument
  std::memcpy(boundary, boundaries, sizeof(float) * (kInBand ? 2 : Layout<kBits>::levels - 1));
  for (int64_t b = 0; b < blocks; ++b) {
    const float* in = x + b * kBlock;
    uint8_t* to = out + b * (kBlock * kBits / 8);
    if constexpr (kBits <= 4)
      encode_block<kBits, kInBand>(in, boundary, to, Lanes<kBits>(), Bytes<kBits>());
    else
      encode_wide_block<kBits>(in, boundary, to, Lanes<kBits>(), Bytes<kBits>());
  }
}

// Whether the machine looks codes of so many bits up in a register.
bool in_register(int64_t bits) {
#ifdef MT_X86
  return bits <= 4 && mt_isa() >= 2;
#else
  return false;
#endif
}

MT_CLONES void encode_loops(const float* x, const float* boundaries, uint8_t* out, int64_t blocks,
                            int64_t bits, int64_t parity) {
  if (parity == kBand) return encode_blocks<1, true>(x, boundaries, out, blocks);
#define MT_ENCODE(BITS) encode_blocks<BITS>(x, boundaries, out, blocks)
  MT_BITS_SWITCH(MT_ENCODE)
}

void encode(const float* x, const float* boundaries, uint8_t* out, int64_t blocks, int64_t bits,
            int64_t parity) {
#ifdef MT_X86
  if (parity != kBand && in_register(bits)) return avx512::encode(x, boundaries, out, blocks, bits);
#endif
  encode_loops(x, boundaries, out, blocks, bits, parity);
}

// What the boundaries are compared with.
MT_CLONES void to_side(const float* x, float* out, int64_t n, int64_t parity, float shift) {
  if (parity == kEven)
    for (int64_t i = 0; i < n; ++i) out[i] = std::fabs(x[i] - shift);
  else
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] - shift;
}

// -- levels --------------------------------------------------------------------------------------

// A tree of selects over the code's bits: no gather, and every level exact. Selecting by and/xor
// on the levels' bit patterns leaves nothing to branch on.
template <int kBits, typename Bits>
MT_INLINE Bits select(Bits code, const Bits* level) {
  if constexpr (kBits == 0) {
    return level[0];
  } else {
    const Bits low = select<kBits - 1>(code, level);
    const Bits high = select<kBits - 1>(code, level + (1 << (kBits - 1)));
    const Bits chosen = Bits{0} - ((code >> (kBits - 1)) & 1u);
    return low ^ ((low ^ high) & chosen);
  }
}

template <int kBits, typename Bits, typename Word>
MT_INLINE Bits level_of(Word shifted, const Bits* level) {
  if constexpr (kBits <= 4)
    return select<kBits, Bits>(static_cast<Bits>(shifted), level);
  else
    return level[static_cast<int32_t>(shifted & (Layout<kBits>::levels - 1))];
}

template <int kBits, typename Bits, size_t... kLane, size_t... kByte>
MT_INLINE void decode_block(const uint8_t* codes, const Bits* level, Bits* out,
                            std::index_sequence<kLane...>, std::index_sequence<kByte...>) {
  constexpr int width = Layout<kBits>::width;
  using Word = typename Layout<kBits>::Word;
#pragma GCC ivdep
  for (int c = 0; c < width; ++c) {
    const Word word = (Word{0} | ... | (static_cast<Word>(codes[kByte * width + c]) << (8 * kByte)));
    ((out[kLane * width + c] = level_of<kBits, Bits>(word >> (kBits * kLane), level)), ...);
  }
}

template <int kBits, typename Bits>
MT_INLINE void decode_blocks(const uint8_t* codes, const Bits* levels, Bits* out, int64_t blocks) {
  Bits level[Layout<kBits>::levels];  // a local copy: `out` could alias the argument
  std::memcpy(level, levels, sizeof(level));
  for (int64_t b = 0; b < blocks; ++b)
    decode_block<kBits, Bits>(codes + b * (kBlock * kBits / 8), level, out + b * kBlock,
                              Lanes<kBits>(), Bytes<kBits>());
}

template <typename Bits>
MT_INLINE void decode_any(const uint8_t* codes, const Bits* levels, Bits* out, int64_t blocks,
                          int64_t bits) {
#define MT_DECODE(BITS) decode_blocks<BITS>(codes, levels, out, blocks)
  MT_BITS_SWITCH(MT_DECODE)
}

MT_CLONES void decode_loops(const uint8_t* codes, const uint32_t* levels, uint32_t* out,
                            int64_t blocks, int64_t bits) {
  decode_any(codes, levels, out, blocks, bits);
}
MT_CLONES void decode(const uint8_t* codes, const uint64_t* levels, uint64_t* out, int64_t blocks,
                      int64_t bits) {
  decode_any(codes, levels, out, blocks, bits);
}
void decode(const uint8_t* codes, const uint32_t* levels, uint32_t* out, int64_t blocks,
            int64_t bits) {
#ifdef MT_X86
  if (in_register(bits)) return avx512::decode(codes, levels, out, blocks, bits);
#endif
  decode_loops(codes, levels, out, blocks, bits);
}

// -- passes --------------------------------------------------------------------------------------

// What a pass takes besides its tensors.
struct Settings {
  const void* table;  // boundaries, or levels; levels of doubles are doubles
  int64_t dtype, bits, parity, function;
  float shift, a, b;

  const float* boundaries() const { return static_cast<const float*>(table); }
};

struct Forward {
  const Settings* settings;
  const void* x;
  void* y;  // null: codes alone are wanted
  uint8_t* codes;
  int64_t n, threads;
};

template <typename T>
constexpr bool kVectors = std::is_same_v<T, float> || std::is_same_v<T, Bf16>;
template <typename T>
using Raw = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;

#ifdef MT_DERIVATIVE_BIT
// One bit in one pass; whether it did.
template <typename T>
bool forward_bit(const Settings& settings, const T* x, T* y, uint8_t* codes, int64_t n) {
  const float high = settings.parity == kBand ? settings.boundaries()[1] : INFINITY;
  const float kept = float_of(settings.parity == kEven ? 0x7FFFFFFFu : 0xFFFFFFFFu);
  const bit::Above above{_mm_set1_ps(settings.boundaries()[0])};
  const bit::Within within{above.low, _mm_set1_ps(high), _mm_set1_ps(settings.shift),
                           _mm_set1_ps(kept)};
  const auto go = [&](auto value) {
    if (settings.parity == kPlain && settings.shift == 0.0f)
      bit::encode(x, y, value, above, codes, n);
    else
      bit::encode(x, y, value, within, codes, n);
    return true;
  };
  if (settings.function == kNone) return go(bit::NoValue(0.0f, 0.0f));
  if (settings.function == kRelu) return go(bit::Relu(0.0f, 0.0f));
  if (settings.function == kLeakyRelu) return go(bit::LeakyRelu(settings.a, settings.b));
  if (settings.function == kHardtanh) return go(bit::Hardtanh(settings.a, settings.b));
  return false;
}
#endif

#ifdef MT_X86
// Two to four bits, or SiLU, in one pass; whether it did.
template <typename T>
bool forward_avx512(const Settings& settings, const T* x, T* y, uint8_t* codes, int64_t n) {
  if (!in_register(settings.bits) || settings.parity == kBand) return false;
  const avx512::Side side{settings.shift, settings.parity == kEven ? INT32_MAX : -1};
  const bool aside = settings.shift != 0.0f || settings.parity == kEven;
  const auto go = [&](auto value, auto is_aside) {
    avx512::encode_any<decltype(value), is_aside.value>(x, y, settings.boundaries(), side, codes, n,
                                                        settings.bits);
    return true;
  };
  if (settings.function == kNone && aside) return go(avx512::NoValue(), std::true_type());
  if (settings.function == kNone) return go(avx512::NoValue(), std::false_type());
  if (settings.function == kSilu && !aside) return go(avx512::Silu(), std::false_type());
  if (settings.function == kRelu && !aside) return go(avx512::Relu(), std::false_type());
  return false;
}
#endif

// In one pass, where the machine has one; whether it did.
template <typename T>
bool forward_at_once(const Forward& job, int64_t begin, int64_t end) {
  if constexpr (kVectors<T>) {
    const Settings& settings = *job.settings;
    const int64_t first = begin * kBlock, n = std::min(end * kBlock, job.n) - first;
    const auto* x = static_cast<const Raw<T>*>(job.x) + first;
    auto* y = static_cast<Raw<T>*>(job.y) + (settings.function == kNone ? 0 : first);
    uint8_t* codes = job.codes + begin * (kBlock / 8 * settings.bits);
#ifdef MT_DERIVATIVE_BIT
    if (settings.bits == 1 && forward_bit(settings, x, y, codes, n)) return true;
#endif
#ifdef MT_X86
    if (forward_avx512(settings, x, y, codes, n)) return true;
#endif
  }
  return false;
}

template <typename T>
void forward_range(const Forward& job, int64_t begin, int64_t end) {
  if (forward_at_once<T>(job, begin, end)) return;
  const Settings& settings = *job.settings;
  float value[kChunk * kBlock], side[kChunk * kBlock];
  const int64_t bytes = kBlock / 8 * settings.bits;
  for (int64_t block = begin; block < end; block += kChunk) {
    const int64_t blocks = std::min(kChunk, end - block), first = block * kBlock;
    const int64_t count = std::min(blocks * kBlock, job.n - first);
    const T* x = static_cast<const T*>(job.x) + first;
    const float* in = value;
    T* y = settings.function == kNone ? nullptr : static_cast<T*>(job.y) + first;
    if constexpr (std::is_same_v<T, float>) {  // read and written where it lies
      if (count == blocks * kBlock)
        in = x;
      else
        std::memcpy(value, x, 4 * count);
      if (settings.function != kNone) apply(x, y, count, settings.function, settings.a, settings.b);
    } else {
      widen(x, value, count);
      if (settings.function != kNone) apply(value, side, count, settings.function, settings.a, settings.b);
      if constexpr (!std::is_same_v<T, double>)
        if (settings.function != kNone) narrow(side, y, count);
    }
    if (count < blocks * kBlock) std::memset(value + count, 0, 4 * (blocks * kBlock - count));
    const float* compared = in;
    if (settings.parity == kEven || settings.shift != 0.0f) {
      to_side(in, side, blocks * kBlock, settings.parity, settings.shift);
      compared = side;
    }
    encode(compared, settings.boundaries(), job.codes + block * bytes, blocks, settings.bits, settings.parity);
  }
}

struct Backward {
  const Settings* settings;
  const void* grad;  // null: the levels themselves are wanted
  const uint8_t* codes;
  void* out;
  int64_t n, threads;
};

// In one pass, where the machine has one; how many blocks of these it did.
template <typename T>
int64_t multiply_at_once(const Backward& job, int64_t begin, int64_t end) {
  if constexpr (kVectors<T>) {
    const Settings& settings = *job.settings;
    if (job.grad == nullptr) return 0;
    const int64_t first = begin * kBlock, n = std::min(end * kBlock, job.n) - first;
    const auto* grad = static_cast<const Raw<T>*>(job.grad) + first;
    auto* out = static_cast<Raw<T>*>(job.out) + first;
    const uint8_t* codes = job.codes + begin * (kBlock / 8 * settings.bits);
#ifdef MT_DERIVATIVE_BIT
    // Rounding to bfloat16 takes steps enough for wide vectors to pay.
    if (settings.bits == 1 && (sizeof(T) == 4 || job.n < kLarge || !in_register(1))) {
      bit::multiply(codes, static_cast<const float*>(settings.table), grad, out, n);
      return end - begin;
    }
#endif
#ifdef MT_X86
    if (in_register(settings.bits)) {
      avx512::multiply(codes, settings.table, grad, out, n / kBlock, settings.bits);
      return n / kBlock;
    }
#endif
  }
  return 0;
}

template <typename T>
void backward_range(const Backward& job, int64_t begin, int64_t end) {
  using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  Bits level[kChunk * kBlock];
  const Settings& settings = *job.settings;
  const int64_t bytes = kBlock / 8 * settings.bits;
  begin += multiply_at_once<T>(job, begin, end);
  for (int64_t block = begin; block < end; block += kChunk) {
    const int64_t blocks = std::min(kChunk, end - block), first = block * kBlock;
    const int64_t count = std::min(blocks * kBlock, job.n - first);
    decode(job.codes + block * bytes, static_cast<const Bits*>(settings.table), level, blocks,
           settings.bits);
    const T* grad = job.grad == nullptr ? nullptr : static_cast<const T*>(job.grad) + first;
    multiply(grad, level, static_cast<T*>(job.out) + first, count);
  }
}

template <typename Work>
void over_blocks(int64_t n, int64_t threads, const Work& work) {
  parallel_for((n + kBlock - 1) / kBlock, kGrain, threads, work);
}

}  // namespace
}  // namespace memtrain

// Codes of `x` and, where `y` is not null (no doubles), the function's value in it.
MT_EXPORT void mt_derivative_encode(const memtrain::Forward* call) {
  using namespace memtrain;
  Settings settings = *call->settings;
  if (call->y == nullptr) settings.function = kNone;
  Forward job = *call;
  job.settings = &settings;
  over_blocks(job.n, job.threads, [&job](int64_t begin, int64_t end) {
    if (job.settings->dtype == kFloat32) forward_range<float>(job, begin, end);
    if (job.settings->dtype == kBfloat16) forward_range<Bf16>(job, begin, end);
    if (job.settings->dtype == kFloat16) forward_range<Half>(job, begin, end);
    if (job.settings->dtype == kFloat64) forward_range<double>(job, begin, end);
  });
}

// out = grad * level of each code; without `grad`, the levels.
MT_EXPORT void mt_derivative_decode(const memtrain::Backward* call) {
  using namespace memtrain;
  const Backward job = *call;
  over_blocks(job.n, job.threads, [&job](int64_t begin, int64_t end) {
    if (job.settings->dtype == kFloat32) backward_range<float>(job, begin, end);
    if (job.settings->dtype == kBfloat16) backward_range<Bf16>(job, begin, end);
    if (job.settings->dtype == kFloat16) backward_range<Half>(job, begin, end);
    if (job.settings->dtype == kFloat64) backward_range<double>(job, begin, end);
  });
}

// 4x4 patches at 2 bits a value (definition: kernels/patch/patch.py). Sixteen patches at a time, one a
// lane: cells[k] holds value k (row by row) of each.
#include <cstring>
#include <type_traits>

#include "halves.h"
#include "patch/channels_avx512.h"
#include "patch/nearest_avx512.h"
#include "philox.h"

namespace memtrain {

constexpr int kLanes = 16, kSide = 4, kCells = kSide * kSide;
constexpr float kLimit = 3.3895313892515355e38f, kTwoThirds = 0.6666666865348816f;

typedef uint64_t __attribute__((may_alias, aligned(2))) FourHalves;

// A float16's bits; infinities and NaN come out as 65,536 and more: finite, and told by it.
MT_INLINE float widen_fp16(uint32_t h) {
  uint32_t magnitude = (h & 0x7FFF) << 13, sign = (h & 0x8000) << 16;
  float normal = float_of(magnitude + 0x38000000u);
  float denormal = float_of(magnitude + 0x38800000u) - 0x1p-14f;
  return float_of(bits_of(magnitude < 0x00800000u ? denormal : normal) | sign);
}

MT_INLINE uint32_t narrow_fp16(float x) {
  uint32_t b = bits_of(x), magnitude = b & 0x7FFFFFFF, sign = (b >> 16) & 0x8000;
  uint32_t normal = (magnitude - 0x38000000u + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  return sign | (magnitude > 0x7F800000u ? 0x7E00u : finite);
}

// To bf16 away from the patch's inside; adding 0x10000 enlarges the magnitude of either sign.
MT_INLINE float outward(float x, bool up) {
  uint32_t b = bits_of(x);
  bool enlarge = ((b & 0xFFFF) != 0) & (((b >> 31) == 0) == up);
  return float_of((b & 0xFFFF0000u) + (enlarge ? 0x10000u : 0u));
}

// What the three dtypes differ in: how a value and an end are read, and a level is rounded.
struct Float32 {
  using Raw = uint32_t;
  static constexpr uint32_t kInfinite = 0x7F800000u;
  MT_INLINE float widen(Raw b) { return float_of(b); }
  MT_INLINE Raw narrow(float x) { return bits_of(x); }
  MT_INLINE float end(float x, bool up) { return outward(x, up); }
  MT_INLINE uint32_t bound_bits(float x) { return bits_of(x) >> 16; }
  MT_INLINE float bound_value(uint32_t b) { return float_of(b << 16); }
};

struct BFloat16 : Float32 {
  using Raw = uint16_t;
  MT_INLINE float widen(Raw b) { return from_bfloat(b); }
  MT_INLINE Raw narrow(float x) { return to_bfloat(x); }
  MT_INLINE float end(float x, bool) { return x; }
};

struct Float16 {
  using Raw = uint16_t;
  static constexpr uint32_t kInfinite = 0x47800000u;  // 65,536
  MT_INLINE float widen(Raw b) { return widen_fp16(b); }
  MT_INLINE Raw narrow(float x) { return static_cast<Raw>(narrow_fp16(x)); }
  MT_INLINE float end(float x, bool) { return x; }
  MT_INLINE uint32_t bound_bits(float x) { return narrow_fp16(x); }
  // A NaN end must stay one.
  MT_INLINE float bound_value(uint32_t b) {
    return (b & 0x7FFF) > 0x7C00 ? float_of(0x7FC00000) : widen_fp16(b);
  }
};

struct Job {
  const void* from;
  void* to;
  int64_t outer, rows, columns, inner;
  uint64_t seed;
  bool stochastic;
  int64_t down() const { return (rows + kSide - 1) / kSide; }
  int64_t across() const { return (columns + kSide - 1) / kSide; }
  int64_t patches() const { return outer * down() * across() * inner; }
};

// A place among the patches, in the order of their words.
struct Cursor {
  int64_t plane, row, column, channel;
  Cursor(const Job& job, int64_t at) {
    channel = at % job.inner, at /= job.inner;
    column = at % job.across(), at /= job.across();
    row = at % job.down(), plane = at / job.down();
  }
  void advance(const Job& job, int64_t n) {
    channel += n;
    if (channel < job.inner) return;
    column += channel / job.inner, channel = 0;
    if (column < job.across()) return;
    column = 0;
    if (++row == job.down()) row = 0, ++plane;
  }
};

// Calls line(lane, run, width, height, at) for the runs of up to kLanes patches that lie side by
// side, of `width` columns and `height` rows each; at[r] is where row r of the first one starts.
template <typename Line>
MT_INLINE void over_lines(const Job& job, Cursor& cursor, int64_t count, const Line& line) {
  for (int64_t lane = 0, run; lane < count; lane += run) {
    const int64_t left = job.columns - cursor.column * kSide, whole = left / kSide;
    run = whole ? std::min(count - lane, whole) : 1;
    if (job.inner > 1) run = std::min(count - lane, job.inner - cursor.channel);
    int64_t at[kSide];
    for (int64_t r = 0; r < kSide; ++r) {
      const int64_t row = cursor.row * kSide + r, first = cursor.row * kSide;
      const int64_t y = cursor.plane * job.rows + (row < job.rows ? row : first);
      at[r] = (y * job.columns + cursor.column * kSide) * job.inner + cursor.channel;
    }
    const int64_t height = std::min<int64_t>(job.rows - cursor.row * kSide, kSide);
    line(lane, run, std::min<int64_t>(left, kSide), height, at);
    cursor.advance(job, run);
  }
}

template <typename F>
MT_INLINE void load_row(const uint32_t* __restrict from, float (*__restrict to)[kLanes], int64_t at,
                        int64_t n) {
  MT_LOOP for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kSide; ++c) to[c][at + i] = float_of(from[i * kSide + c]);
}

template <typename F>
MT_INLINE void load_row(const uint16_t* __restrict from, float (*__restrict to)[kLanes], int64_t at,
                        int64_t n) {
  const FourHalves* words = reinterpret_cast<const FourHalves*>(from);
  MT_LOOP for (int64_t i = 0; i < n; ++i) {
    const uint64_t word = words[i];
    const uint32_t low = static_cast<uint32_t>(word), high = static_cast<uint32_t>(word >> 32);
    to[0][at + i] = F::widen(static_cast<uint16_t>(low));
    to[1][at + i] = F::widen(static_cast<uint16_t>(low >> 16));
    to[2][at + i] = F::widen(static_cast<uint16_t>(high));
    to[3][at + i] = F::widen(static_cast<uint16_t>(high >> 16));
  }
}

template <typename F>
MT_INLINE void load(const Job& job, Cursor& cursor, int64_t count,
                    float (*__restrict cells)[kLanes]) {
  const auto* from = static_cast<const typename F::Raw*>(job.from);
  over_lines(job, cursor, count, [&](int64_t lane, int64_t run, int64_t width, int64_t,
                                     const int64_t* at) __attribute__((always_inline)) {
    for (int r = 0; r < kSide; ++r) {
      const auto* row = from + at[r];
      if (job.inner == 1 && width == kSide) {
        if (run == kLanes)
          load_row<F>(row, cells + r * kSide, 0, kLanes);
        else
          load_row<F>(row, cells + r * kSide, lane, run);
        continue;
      }
      for (int64_t c = 0; c < kSide; ++c) {
        const auto* cell = row + (c < width ? c : 0) * job.inner;
        float* to = cells[r * kSide + c] + lane;
        if (run == kLanes)
          MT_LOOP for (int i = 0; i < kLanes; ++i) to[i] = F::widen(cell[i]);
        else
          for (int64_t i = 0; i < run; ++i) to[i] = F::widen(cell[i]);
      }
    }
  });
}

struct Levels {
  float level[4][kLanes];
};

// A NaN stays one: of a float16's, `widen` knows nothing.
template <typename F>
MT_INLINE float rounded(float x) {
  return x != x ? x : F::widen(F::narrow(x));
}

template <typename F>
MT_INLINE void inner_levels(Levels& l) {
  MT_LOOP for (int i = 0; i < kLanes; ++i) {
    const float third = (0.5f * l.level[3][i] - 0.5f * l.level[0][i]) * kTwoThirds;
    l.level[1][i] = rounded<F>(l.level[0][i] + third);
    l.level[2][i] = rounded<F>(l.level[3][i] - third);
  }
}

// The bounds of each lane's patch, as the words keep them and as floats.
template <typename F>
MT_INLINE void find_bounds(const float (*__restrict cells)[kLanes], Levels& l,
                         uint64_t* __restrict words) {
  float lo[kLanes], hi[kLanes];
  uint32_t top[kLanes];
  MT_LOOP for (int i = 0; i < kLanes; ++i) lo[i] = hi[i] = cells[0][i], top[i] = 0;
  for (int k = 0; k < kCells; ++k)
    MT_LOOP for (int i = 0; i < kLanes; ++i) {
      const float x = cells[k][i];
      const uint32_t m = bits_of(x) & 0x7FFFFFFF;
      lo[i] = x < lo[i] ? x : lo[i];
      hi[i] = x > hi[i] ? x : hi[i];
      top[i] = m > top[i] ? m : top[i];
    }
  MT_LOOP for (int i = 0; i < kLanes; ++i) {
    float a = F::end(lo[i], false), b = F::end(hi[i], true);
    a = (a < -kLimit ? -kLimit : a > kLimit ? kLimit : a) + 0.0f;
    b = (b < -kLimit ? -kLimit : b > kLimit ? kLimit : b) + 0.0f;
    const bool finite = top[i] < F::kInfinite;
    l.level[0][i] = finite ? a : float_of(0x7FC00000);
    l.level[3][i] = finite ? b : float_of(0x7FC00000);
  }
  MT_LOOP for (int i = 0; i < kLanes; ++i)
    words[i] = F::bound_bits(l.level[0][i]) | F::bound_bits(l.level[3][i]) << 16;
}

// Codes of cells [8 * HALF, 8 * HALF + 8), 16 bits a lane: how many levels lie far enough below.
MT_INLINE void encode(const float (*__restrict cells)[kLanes], const Levels& l, bool stochastic,
                      uint32_t counter, uint64_t seed, uint32_t* __restrict codes) {
  uint32_t draws[4][kLanes];
  float u[kLanes], bases[3][kLanes], widths[3][kLanes];
  // Halves, since a difference may overflow.
  for (int j = 0; j < 3; ++j)
    MT_LOOP for (int i = 0; i < kLanes; ++i) {
      bases[j][i] = 0.5f * l.level[j][i];
      widths[j][i] = 0.5f * l.level[j + 1][i] - bases[j][i];
    }
  MT_LOOP for (int i = 0; i < kLanes; ++i) u[i] = 0.5f, codes[i] = 0;
  if (stochastic) philox_piece<kLanes>(counter, seed, draws);
  for (int k = 0; k < kCells / 2; ++k) {
    if (stochastic)
      MT_LOOP for (int i = 0; i < kLanes; ++i) {
        const uint32_t r = (draws[k / 2][i] >> (k % 2 * 16)) & 0xFFFF;
        u[i] = (static_cast<float>(static_cast<int32_t>(r)) + 0.5f) * 0x1p-16f;
      }
    MT_LOOP for (int i = 0; i < kLanes; ++i) {
      const float x = 0.5f * cells[k][i];
      uint32_t code = x - bases[0][i] >= u[i] * widths[0][i] ? 1u : 0u;
      code += x - bases[1][i] >= u[i] * widths[1][i] ? 1u : 0u;
      code += x - bases[2][i] >= u[i] * widths[2][i] ? 1u : 0u;
      codes[i] |= code << (2 * k);
    }
  }
}

template <typename F>
MT_INLINE void quantize(const Job& job, int64_t begin, int64_t end) {
  const uint32_t patches = static_cast<uint32_t>(job.patches());
  float cells[kCells][kLanes] = {};
  uint64_t words[kLanes];
  uint32_t upper[kLanes], lower[kLanes];
  Levels levels;
  Cursor cursor(job, begin);
  for (int64_t at = begin; at < end; at += kLanes) {
    const int64_t count = std::min<int64_t>(end - at, kLanes);
    load<F>(job, cursor, count, cells);
    find_bounds<F>(cells, levels, words);
    inner_levels<F>(levels);
    const uint32_t counter = static_cast<uint32_t>(at);
    encode(cells, levels, job.stochastic, counter, job.seed, upper);
    encode(cells + kCells / 2, levels, job.stochastic, counter + patches, job.seed, lower);
    MT_LOOP for (int i = 0; i < kLanes; ++i)
      words[i] |= static_cast<uint64_t>(upper[i] | lower[i] << 16) << 32;
    std::memcpy(static_cast<uint64_t*>(job.to) + at, words, count * sizeof(uint64_t));
  }
}

template <typename Raw>
MT_INLINE void store_row(const uint32_t (*__restrict from)[kLanes], Raw* __restrict to, int64_t at,
                         int64_t n) {
  MT_LOOP for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(Raw) == 2) {
      const uint32_t low = from[0][at + i] | from[1][at + i] << 16;
      const uint32_t high = from[2][at + i] | from[3][at + i] << 16;
      reinterpret_cast<FourHalves*>(to)[i] = low | static_cast<uint64_t>(high) << 32;
    } else {
      for (int c = 0; c < kSide; ++c) to[i * kSide + c] = from[c][at + i];
    }
  }
}

template <typename F>
MT_INLINE void store(const Job& job, Cursor& cursor, int64_t count,
                     const uint32_t (*__restrict cells)[kLanes]) {
  using Raw = typename F::Raw;
  auto* to = static_cast<Raw*>(job.to);
  over_lines(job, cursor, count, [&](int64_t lane, int64_t run, int64_t width, int64_t height,
                                     const int64_t* at) __attribute__((always_inline)) {
    for (int r = 0; r < height; ++r) {
      auto* row = to + at[r];
      if (job.inner == 1 && width == kSide) {
        if (run == kLanes)
          store_row(cells + r * kSide, row, 0, kLanes);
        else
          store_row(cells + r * kSide, row, lane, run);
        continue;
      }
      for (int64_t c = 0; c < width; ++c) {
        const uint32_t* from = cells[r * kSide + c] + lane;
        auto* cell = row + c * job.inner;
        if (run == kLanes)
          MT_LOOP for (int i = 0; i < kLanes; ++i) cell[i] = static_cast<Raw>(from[i]);
        else
          for (int64_t i = 0; i < run; ++i) cell[i] = static_cast<Raw>(from[i]);
      }
    }
  });
}

template <typename F>
MT_INLINE void dequantize(const Job& job, int64_t begin, int64_t end) {
  uint64_t words[kLanes] = {};
  uint32_t codes[kLanes], raw[4][kLanes], cells[kCells][kLanes];
  Levels l;
  Cursor cursor(job, begin);
  for (int64_t at = begin; at < end; at += kLanes) {
    const int64_t count = std::min<int64_t>(end - at, kLanes);
    std::memcpy(words, static_cast<const uint64_t*>(job.from) + at, count * sizeof(uint64_t));
    MT_LOOP for (int i = 0; i < kLanes; ++i) {
      const uint32_t bounds = static_cast<uint32_t>(words[i]);
      codes[i] = static_cast<uint32_t>(words[i] >> 32);
      l.level[0][i] = F::bound_value(bounds & 0xFFFF);
      l.level[3][i] = F::bound_value(bounds >> 16);
    }
    inner_levels<F>(l);
    for (int j = 0; j < 4; ++j)
      MT_LOOP for (int i = 0; i < kLanes; ++i) raw[j][i] = F::narrow(l.level[j][i]);
    for (int k = 0; k < kCells; ++k)
      MT_LOOP for (int i = 0; i < kLanes; ++i) {
        const uint32_t code = codes[i] >> (2 * k);
        const uint32_t low = code & 1 ? raw[1][i] : raw[0][i];
        const uint32_t high = code & 1 ? raw[3][i] : raw[2][i];
        cells[k][i] = code & 2 ? high : low;
      }
    store<F>(job, cursor, count, cells);
  }
}

// A function per dtype and direction: what is compiled for each machine.
#define MT_PATCH_RANGES(F)                                                              \
  MT_CLONES static void quantize_##F(const Job& job, int64_t begin, int64_t end) {      \
    quantize<F>(job, begin, end);                                                       \
  }                                                                                     \
  MT_CLONES static void dequantize_##F(const Job& job, int64_t begin, int64_t end) {    \
    dequantize<F>(job, begin, end);                                                     \
  }
MT_PATCH_RANGES(Float32)
MT_PATCH_RANGES(BFloat16)
MT_PATCH_RANGES(Float16)

using Range = void (*)(const Job&, int64_t, int64_t);
constexpr Range kQuantize[] = {quantize_Float32, quantize_BFloat16, quantize_Float16};
constexpr Range kDequantize[] = {dequantize_Float32, dequantize_BFloat16, dequantize_Float16};

static void over_patches(const Job& job, Range range, int64_t threads) {
  const int64_t groups = (job.patches() + kLanes - 1) / kLanes;
  parallel_for(groups, 128, threads, [&](int64_t begin, int64_t end) {
    range(job, begin * kLanes, std::min(end * kLanes, job.patches()));
  });
}

#ifdef MT_X86
template <typename F>
void quantize_fast(const Job& job, int64_t begin, int64_t end) {
  if (job.inner > 1)
    job.stochastic ? avx512::quantize_channels<F, true>(job, begin, end)
                   : avx512::quantize_channels<F, false>(job, begin, end);
  else if (job.stochastic)
    avx512::quantize_quads<F, true>(job, begin, end);
  else if constexpr (sizeof(typename F::T) == 2)
    avx512::quantize_nearest<F>(job, begin, end);
  else
    avx512::quantize_quads<F, false>(job, begin, end);
}

template <typename F>
void dequantize_fast(const Job& job, int64_t begin, int64_t end) {
  job.inner > 1 ? avx512::dequantize_channels<F>(job, begin, end)
                : avx512::dequantize_quads<F>(job, begin, end);
}

constexpr Range kQuantizeFast[] = {quantize_fast<avx512::Floats>, quantize_fast<avx512::Bfloats>,
                                   quantize_fast<avx512::Halves>};
constexpr Range kDequantizeFast[] = {dequantize_fast<avx512::Floats>,
                                     dequantize_fast<avx512::Bfloats>,
                                     dequantize_fast<avx512::Halves>};

// Quads, or positions and sixteen channels.
static int64_t pieces_of(const Job& job) {
  const int64_t bands = job.outer * job.down();
  return job.inner > 1 ? bands * job.across() * ((job.inner + 15) / 16)
                       : bands * ((job.across() + 3) / 4);
}

// False where the machine or the tensor leaves nothing to do.
static bool over_pieces(const Job& job, Range range, int64_t threads) {
  if (mt_isa() < 2 || job.patches() == 0) return false;
  parallel_for(pieces_of(job), 512, threads,
               [&](int64_t begin, int64_t end) { range(job, begin, end); });
  return true;
}
#endif

}  // namespace memtrain

MT_EXPORT void mt_patch_quantize(const void* x, int64_t kind, uint64_t* words, int64_t outer,
                                 int64_t rows, int64_t columns, int64_t inner, int64_t seed,
                                 int64_t stochastic, int64_t threads) {
  using namespace memtrain;
  const Job job{x, words, outer, rows, columns, inner, static_cast<uint64_t>(seed),
                stochastic != 0};
#ifdef MT_X86
  if (over_pieces(job, kQuantizeFast[kind], threads)) return;
#endif
  over_patches(job, kQuantize[kind], threads);
}

MT_EXPORT void mt_patch_dequantize(const uint64_t* words, void* out, int64_t kind, int64_t outer,
                                   int64_t rows, int64_t columns, int64_t inner, int64_t threads) {
  using namespace memtrain;
  const Job job{words, out, outer, rows, columns, inner, 0, false};
#ifdef MT_X86
  if (over_pieces(job, kDequantizeFast[kind], threads)) return;
#endif
  over_patches(job, kDequantize[kind], threads);
}

// Rounding to floating-point formats of up to 16 bits (definition: kernels/floats/rounding.py).
#include "floats/runs.h"
#include "random/draws.h"

namespace memtrain {

constexpr int64_t kRun = kDrawn;
constexpr int32_t kRunInf = 0x7F800000, kRunNan = 0x7FC00000;
enum Rounding : int32_t { kAway, kEven, kStochastic };

struct FloatForm {
  int32_t mantissa, least, limit, over, rounding;
};

// Arguments, in the order of `_round` in rounding.py.
struct RoundCall {
  const void* x;
  void* out;
  int64_t *count, form[5], n, type, seed, threads;
};

static FloatForm form_of(const int64_t* numbers) {
  int32_t n[5];
  for (int i = 0; i < 5; ++i) n[i] = static_cast<int32_t>(numbers[i]);
  return {n[0], n[1], n[2], n[3], n[4]};
}

template <int ROUNDING>
MT_INLINE int32_t magnitude_code(int32_t magnitude, int32_t draw, const FloatForm& f) {
  const int32_t field = magnitude >> 23, exponent = field < 1 ? 1 : field;
  int32_t significand = (magnitude & 0x7FFFFF) + (field < 1 ? 0 : 1 << 23);
  const int32_t below = f.least + 127 - exponent;
  const int32_t base = (below < 0 ? -below : 0) << f.mantissa;
  int32_t shift = 23 - f.mantissa + (below > 0 ? below : 0), part;
  if constexpr (ROUNDING == kStochastic) {
    int32_t past = shift - 30;
    past = past < 0 ? 0 : past;
    significand >>= past > 24 ? 24 : past;
    shift = shift > 30 ? 30 : shift;
    const int32_t left = shift - 17;
    part = (2 * draw + 1) << (left > 0 ? left : 0) >> (left < 0 ? -left : 0);
  } else {
    shift = shift > 25 ? 25 : shift;
    part = 1 << (shift - 1);
  }
  if constexpr (ROUNDING == kEven) part += ((base + (significand >> shift)) & 1) - 1;
  return base + ((significand + part) >> shift);
}

MT_INLINE int32_t value_bits(int32_t code, const FloatForm& f) {
  const int32_t normal = (code << (23 - f.mantissa)) + ((f.least + 126) << 23);
  const int32_t whole = static_cast<int32_t>(bits_of(static_cast<float>(code)));
  const int32_t small = (whole + (f.least - f.mantissa) * (1 << 23)) & -int32_t{code > 0};
  // A least exponent of -126 is float32's own: its subnormals follow from the normal form.
  const int32_t pick = -int32_t{(code < 1 << f.mantissa) & (f.least != -126)};
  // Masks, not conditions: GCC would put the conversion behind a branch, and find no vectors.
  return (small & pick) | (normal & ~pick);
}

// Returns how many overflow. `out` holds the bits of float32 numbers; it may be `bits`.
template <int ROUNDING>
MT_INLINE int64_t round_run(const uint32_t* bits, const uint16_t* draws, int32_t n,
                            const FloatForm& form, int32_t* out) {
  const FloatForm f = form;
  int32_t count = 0;
#pragma GCC ivdep
  for (int32_t i = 0; i < n; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits[i] & 0x7FFFFFFFu);
    const int32_t draw = ROUNDING == kStochastic ? draws[i] : 0;
    const int32_t code = magnitude_code<ROUNDING>(magnitude, draw, f);
    const bool past = code > f.limit, nan = magnitude > kRunInf;
    count += past & !nan;
    int32_t result = value_bits(past ? f.limit : code, f);
    result = past ? f.over : result;
    result = nan ? kRunNan : result;
    out[i] = static_cast<int32_t>(static_cast<uint32_t>(result) | (bits[i] & 0x80000000u));
  }
  return count;
}

MT_CLONES static int64_t round_any(const uint32_t* bits, const uint16_t* draws, int32_t n,
                                   const FloatForm& f, int32_t* out) {
  if (f.rounding == kAway) return round_run<kAway>(bits, draws, n, f, out);
  if (f.rounding == kEven) return round_run<kEven>(bits, draws, n, f, out);
  return round_run<kStochastic>(bits, draws, n, f, out);
}

}  // namespace memtrain

MT_EXPORT void mt_floats_round(const memtrain::RoundCall* call) {
  using namespace memtrain;
  const RoundCall c = *call;
  const FloatForm f = form_of(c.form);
  std::atomic<int64_t> overflows{0};
  parallel_for((c.n + kRun - 1) / kRun, 32, c.threads, [&](int64_t begin, int64_t end) {
    float in[kRun];
    uint32_t copy[kRun];
    int32_t results[kRun];
    uint16_t draws[kRun];
    int64_t here = 0;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t from = b * kRun, size = std::min(kRun, c.n - from);
      if (f.rounding == kStochastic)
        draw_block(b, static_cast<uint64_t>(c.seed), draws);
      const bool whole = c.type == kFloat32;
      if (!whole) {
        read_floats(c.x, c.type, from, size, in);
        std::memcpy(copy, in, size * 4);
      }
      const uint32_t* bits = whole ? static_cast<const uint32_t*>(c.x) + from : copy;
      int32_t* to = whole ? static_cast<int32_t*>(c.out) + from : results;
      here += round_any(bits, draws, static_cast<int32_t>(size), f, to);
      if (!whole) {
        std::memcpy(in, results, size * 4);
        write_floats(c.out, c.type, from, size, in);
      }
    }
    overflows += here;
  });
  *c.count = overflows;
}

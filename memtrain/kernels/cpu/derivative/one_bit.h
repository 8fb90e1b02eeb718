// Few-bit codes of one bit (layout: kernels/packing/bits.py), sixteen bytes of vector at a time.
//
// Memory sets the pace, not the width of the vectors; and a core that has met arithmetic in wider
// ones runs 15 to 30% slower for the next half millisecond, Python and all. SSE2 is in every x86-64.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define MT_DERIVATIVE_BIT
#include <emmintrin.h>

#include <cstring>
#include <type_traits>

#include "common.h"

namespace memtrain::bit {
namespace {

constexpr int kBlock = 256, kLane = 32;  // a block's elements; those of one bit of its 32 bytes

// Four floats, or eight bfloat16s as two times four.
MT_INLINE void read(const float* x, __m128* v) {
  v[0] = _mm_loadu_ps(x);
  v[1] = _mm_loadu_ps(x + 4);
}
MT_INLINE void read(const uint16_t* x, __m128* v) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m128i zero = _mm_setzero_si128();
  v[0] = _mm_castsi128_ps(_mm_unpacklo_epi16(zero, both));
  v[1] = _mm_castsi128_ps(_mm_unpackhi_epi16(zero, both));
}

// Rounds to the nearest, ties to even. A NaN here has only zeros in the half that is cut off.
MT_INLINE __m128i rounded(__m128 v) {
  const __m128i bits = _mm_castps_si128(v);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  return _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7FFF)));
}

template <bool kExact>  // whether a bfloat16 is known to hold the number
MT_INLINE void write(const __m128* v, float* out) {
  _mm_storeu_ps(out, v[0]);
  _mm_storeu_ps(out + 4, v[1]);
}
template <bool kExact>
MT_INLINE void write(const __m128* v, uint16_t* out) {
  __m128i upper[2];
  for (int j = 0; j < 2; ++j)
    upper[j] = _mm_srai_epi32(kExact ? _mm_castps_si128(v[j]) : rounded(v[j]), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi32(upper[0], upper[1]));
}

// Fetches what lies 2 KiB ahead, half a page: the hardware does not look beyond pages.
template <typename T>
MT_INLINE void fetch(const T* at) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + 2048));
}

// The function whose value is wanted besides; NaN passes.
struct NoValue {
  static constexpr bool exact = true;
  explicit NoValue(float, float) {}
  MT_INLINE __m128 of(NoValue, __m128 x) { return x; }
};
struct Relu {
  static constexpr bool exact = true;
  explicit Relu(float, float) {}
  MT_INLINE __m128 of(Relu, __m128 x) { return _mm_max_ps(_mm_setzero_ps(), x); }
};
struct LeakyRelu {
  static constexpr bool exact = false;
  __m128 slope;
  explicit LeakyRelu(float a, float) : slope(_mm_set1_ps(a)) {}
  MT_INLINE __m128 of(const LeakyRelu& f, __m128 x) {
    const __m128 positive = _mm_cmpgt_ps(x, _mm_setzero_ps());
    return _mm_or_ps(_mm_and_ps(positive, x), _mm_andnot_ps(positive, _mm_mul_ps(x, f.slope)));
  }
};
struct Hardtanh {
  static constexpr bool exact = true;  // its bounds are bfloat16s where x is
  __m128 low, high;
  explicit Hardtanh(float a, float b) : low(_mm_set1_ps(a)), high(_mm_set1_ps(b)) {}
  MT_INLINE __m128 of(const Hardtanh& f, __m128 x) {
    return _mm_min_ps(f.high, _mm_max_ps(f.low, x));
  }
};

// Code 1 is for what lies above `low`.
struct Above {
  __m128 low;
  MT_INLINE __m128 of(const Above& side, __m128 v) { return _mm_cmpgt_ps(v, side.low); }
};
// Code 1 is for what, less `shift` and without its sign where `kept` says so, lies in a band.
struct Within {
  __m128 low, high, shift, kept;
  MT_INLINE __m128 of(const Within& side, __m128 v) {
    v = _mm_and_ps(_mm_sub_ps(v, side.shift), side.kept);
    return _mm_and_ps(_mm_cmpgt_ps(v, side.low), _mm_cmple_ps(v, side.high));
  }
};

template <typename Value, typename Side, typename T>
MT_INLINE void encode_blocks(const T* x, T* y, const Value& value, const Side& side, uint8_t* out,
                             int64_t blocks) {
  for (; blocks > 0; --blocks, x += kBlock, y += kBlock, out += kLane) {
    __m128i bytes[2] = {};
    for (int lane = 0; lane < 8; ++lane) {
      const __m128i bit = _mm_set1_epi8(static_cast<char>(1 << lane));
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m128i above[2];
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          const int at = kLane * lane + 16 * half + 8 * k;
          if (k == 0 && (half == 0 || sizeof(T) == 4)) fetch(x + at);
          __m128 v[2];
          read(x + at, v);
          if constexpr (!std::is_same_v<Value, NoValue>) {
            const __m128 values[2] = {Value::of(value, v[0]), Value::of(value, v[1])};
            write<Value::exact>(values, y + at);
          }
          above[k] = _mm_packs_epi32(_mm_castps_si128(Side::of(side, v[0])),
                                     _mm_castps_si128(Side::of(side, v[1])));
        }
        const __m128i all = _mm_packs_epi16(above[0], above[1]);
        bytes[half] = _mm_or_si128(bytes[half], _mm_and_si128(all, bit));
      }
    }
    for (int half = 0; half < 2; ++half)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * half), bytes[half]);
  }
}

// Of `n` numbers, the last block filled up with 0.
template <typename Value, typename Side, typename T>
void encode(const T* x, T* y, const Value& value, const Side& side, uint8_t* out, int64_t n) {
  const int64_t blocks = n / kBlock, whole = blocks * kBlock, rest = n - whole;
  encode_blocks(x, y, value, side, out, blocks);
  if (rest == 0) return;
  T from[kBlock] = {}, to[kBlock];
  std::memcpy(from, x + whole, rest * sizeof(T));
  encode_blocks(from, to, value, side, out + blocks * kLane, 1);
  if constexpr (!std::is_same_v<Value, NoValue>) std::memcpy(y + whole, to, rest * sizeof(T));
}

// The level of each code times a number of `grad`. `out` may be `grad`.
template <typename T>
MT_INLINE void multiply_blocks(const uint8_t* codes, const float* levels, const T* grad, T* out,
                               int64_t blocks) {
  const __m128 low = _mm_set1_ps(levels[0]);
  const __m128 either = _mm_xor_ps(low, _mm_set1_ps(levels[1]));
  for (; blocks > 0; --blocks, codes += kLane, grad += kBlock, out += kBlock) {
    __m128i bytes[2];
    for (int half = 0; half < 2; ++half)
      bytes[half] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * half));
    for (int lane = 0; lane < 8; ++lane) {
      const __m128i bit = _mm_set1_epi8(static_cast<char>(1 << lane));
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        // 16 bytes of zeros or ones become 16 numbers of them by doubling twice.
        const __m128i one = _mm_cmpeq_epi8(_mm_and_si128(bytes[half], bit), bit);
        const __m128i pairs[2] = {_mm_unpacklo_epi8(one, one), _mm_unpackhi_epi8(one, one)};
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          const int at = kLane * lane + 16 * half + 8 * k;
          if (k == 0 && (half == 0 || sizeof(T) == 4)) fetch(grad + at);
          const __m128i chosen[2] = {_mm_unpacklo_epi16(pairs[k], pairs[k]),
                                     _mm_unpackhi_epi16(pairs[k], pairs[k])};
          __m128 v[2];
          read(grad + at, v);
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            const __m128 level = _mm_xor_ps(low, _mm_and_ps(either, _mm_castsi128_ps(chosen[j])));
            v[j] = _mm_mul_ps(v[j], level);
          }
          write<false>(v, out + at);
        }
      }
    }
  }
}

// Of `n` numbers; the last block's codes are whole.
template <typename T>
void multiply(const uint8_t* codes, const float* levels, const T* grad, T* out, int64_t n) {
  const int64_t blocks = n / kBlock, whole = blocks * kBlock, rest = n - whole;
  multiply_blocks(codes, levels, grad, out, blocks);
  if (rest == 0) return;
  T from[kBlock] = {}, to[kBlock];
  std::memcpy(from, grad + whole, rest * sizeof(T));
  multiply_blocks(codes + blocks * kLane, levels, from, to, 1);
  std::memcpy(out + whole, to, rest * sizeof(T));
}

}  // namespace
}  // namespace memtrain::bit

#endif

// Group quantisation with AVX-512, from numbers to packed bytes. Whole groups only; results as in
// group.cpp. Their bounds: min_max_avx512.h.
#pragma once

#include "packing/codes.h"

#ifdef MT_X86
#include "group/min_max_avx512.h"
#include "philox_avx512.h"
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

// -- what the dtypes differ in: thirty-two positions as two registers, or some of sixteen as one --

struct Floats {
  using T = float;
  static constexpr bool kInterleaved = false;
  MT_INLINE void load(const T* x, __mmask16 some, __m512 (&to)[1]) {
    to[0] = _mm512_maskz_loadu_ps(some, x);
  }
  MT_INLINE void load(const T* x, __mmask16, __m512 (&to)[2]) {
    to[0] = _mm512_loadu_ps(x), to[1] = _mm512_loadu_ps(x + 16);
  }
  MT_INLINE __m512 half_less(__m512 x, __m512 base) {
    return _mm512_sub_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), base);
  }
};

struct Bfloats {
  using T = uint16_t;
  static constexpr bool kInterleaved = true;
  MT_INLINE void load(const T* x, __mmask16 some, __m512 (&to)[1]) {
    const __m256i half = _mm256_maskz_loadu_epi16(some, x);
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  // The even ones and the odd: a shift and a mask widen them.
  MT_INLINE void load(const T* x, __mmask16, __m512 (&to)[2]) {
    const __m512i both = _mm512_loadu_si512(x);
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    to[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-0x10000)));
  }
  // Rounded once: so is the difference alone, where half of x is exact.
  MT_INLINE __m512 half_less(__m512 x, __m512 base) {
    return _mm512_fmsub_ps(x, _mm512_set1_ps(0.5f), base);
  }
};

// The lowest bytes of all lanes of two registers that F filled, or of some of one.
template <typename F, int N>
MT_INLINE void store_bytes(uint8_t* to, __mmask16 some, const __m512i (&codes)[N]) {
  if (N == 1) {
    _mm_mask_storeu_epi8(to, some, _mm512_cvtepi32_epi8(codes[0]));
  } else if (F::kInterleaved) {
    const __m512i low = _mm512_set1_epi32(0xFF), odd = _mm512_slli_epi32(codes[1], 8);
    const __m512i both = _mm512_ternarylogic_epi32(low, codes[0], odd, 0xCA);  // a ? b : c
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(both));
  } else {
    for (int i = 0; i < N; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i), _mm512_cvtepi32_epi8(codes[i]));
  }
}

// -- from numbers to codes -----------------------------------------------------------------------

struct Encoding {
  Keys keys;
  bool stochastic;
  int64_t ahead;  // how far ahead numbers are fetched, in elements
};

constexpr int kPlaces = 16;  // of codes in words: eight lanes', and the same 8 bits up

// Where a code lies in the packed word, k bits up, it is made there: all that leads to it is larger
// by 2**k, which rounds nothing differently. Here are numbers for each place, in memory: GCC would
// make constants anew wherever they are used.
struct Places {
  float power[kPlaces];     // 2**k
  uint32_t field[kPlaces];  // a code's bits
  float most[kPlaces];      // the greatest code
  float half[kPlaces];      // u where nothing is random
  float one[kPlaces];       // 2**(k + 7): a draw put below its highest bit is a draw / 2**16 more
  float less[kPlaces];      // which is this more than u
};

MT_INLINE Places places_of(int bits) {
  Places p;
  for (int i = 0; i < kPlaces; ++i) {
    const int k = bits * (i % lanes_of(bits)) + i / 8 * 8;
    const uint32_t most = (1u << bits) - 1;
    const float power = static_cast<float>(1u << k);
    p.power[i] = power, p.field[i] = most << k;
    p.most[i] = static_cast<float>(most) * power, p.half[i] = 0.5f * power;
    p.one[i] = 0x1p7f * power, p.less[i] = (0x1p7f - 0x1p-17f) * power;
  }
  return p;
}

// What encoding needs to know of a group: half its minimum, 1 / step for each place.
struct Group {
  float base, inverse[kPlaces];
};

MT_INLINE void set_group(Group& group, float base, float inverse, const Places& p) {
  group.base = base;
  _mm512_storeu_ps(group.inverse,
                   _mm512_mul_ps(_mm512_loadu_ps(p.power), _mm512_set1_ps(inverse)));
}

// (draw + 0.5) / 2**16 at a place, exactly.
template <bool kUpper>
MT_INLINE __m512 uniform(__m512i word, const Places& p, int place) {
  const __m512i one = _mm512_castps_si512(_mm512_set1_ps(p.one[place]));
  const __m512i low = _mm512_set1_epi32(0xFFFF);
  const __m512i sum = kUpper ? _mm512_or_si512(_mm512_srli_epi32(word, 16), one)
                             : _mm512_ternarylogic_epi32(one, word, low, 0xF8);  // a | b & c
  return _mm512_sub_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(p.less[place]));
}

// How sixteen numbers are encoded. Where all of a group's are `kInside` its bounds, a code of up to
// 4 bits needs no limits: it is below 2**bits by more than the roundings.
template <typename F, bool kStochastic, bool kInside, bool kUpper>
MT_INLINE __m512i encode(__m512 x, __m512i draws, const Group& group, const Places& p, int place) {
  const __m512 u = kStochastic ? uniform<kUpper>(draws, p, place) : _mm512_set1_ps(p.half[place]);
  const __m512 above = F::half_less(x, _mm512_set1_ps(group.base));
  __m512 t = _mm512_add_ps(_mm512_mul_ps(above, _mm512_set1_ps(group.inverse[place])), u);
  if (!kInside)
    t = _mm512_max_ps(_mm512_min_ps(t, _mm512_set1_ps(p.most[place])), _mm512_setzero_ps());
  return _mm512_cvttps_epi32(t);
}

// 16 * N positions of slice S of a group (if these are 16, `some` of them), and of the slices after
// it, which share their counters. Adds the codes to `word`; a lane of the packed words is one slice or more.
template <int kBits, typename F, bool kStochastic, bool kInside, int N, bool kShared, int S = 0>
MT_INLINE void encode_slices(const typename F::T* x, int64_t slice, const __m512i (*draws)[4],
                             const Group& group, const Places& p, __mmask16 some,
                             int64_t ahead, __m512i (*word)[N]) {
  constexpr int kSlices = 8 / lanes_of(kBits), kLane = S / kSlices;
  __m512 number[N];
  F::load(x, some, number);
  for (size_t line = 0; line < sizeof(number) / 4 * sizeof(*x); line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(x + ahead) + line, _MM_HINT_T1);
#pragma GCC unroll 2
  for (int i = 0; i < N; ++i) {
    const int place = kLane + (kShared ? 8 * i : 0);
    const __m512i code = encode<F, kStochastic, kInside, S % 2>(number[i], draws[i][S / 2], group,
                                                               p, place);
    const __m512i field = _mm512_set1_epi32(static_cast<int>(p.field[place]));
    __m512i& to = word[S % kSlices][kShared ? 0 : i];
    to = place ? _mm512_ternarylogic_epi32(code, to, field, 0xEC)  // a & c | b
               : _mm512_and_si512(code, field);
  }
  if constexpr (S < 7)
    encode_slices<kBits, F, kStochastic, kInside, N, kShared, S + 1>(x + slice, slice, draws, group,
                                                                     p, some, ahead, word);
}

template <int kBits, typename F, bool kStochastic, bool kInside, int N>
MT_INLINE void encode_positions(const typename F::T* x, uint8_t* out, int64_t size,
                                const __m512i (*draws)[4], const Group& group, const Places& p,
                                __mmask16 some, int64_t ahead) {
  constexpr int kLanes = lanes_of(kBits), kSlices = 8 / kLanes, kBytes = kLanes * kBits / 8;
  static_assert(kLanes * kBits <= 32, "a word has 32 bits");
  constexpr bool kShared = F::kInterleaved && N == 2 && kBytes == 1;  // one word of both registers
  const int64_t slice = size / 8, width = size / kLanes;
  __m512i word[kSlices][N];
  encode_slices<kBits, F, kStochastic, kInside, N, kShared>(x, slice, draws, group, p, some, ahead,
                                                            word);
#pragma GCC unroll 8
  for (int h = 0; h < kSlices; ++h)
#pragma GCC unroll 4
    for (int b = 0; b < kBytes; ++b) {
      uint8_t* to = out + b * width + h * slice;
      if (kShared) {
        const __m256i both = _mm512_cvtepi32_epi16(word[h][0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), both);
      } else {
        __m512i bytes[N];
        for (int i = 0; i < N; ++i) bytes[i] = _mm512_srli_epi32(word[h][i], 8 * b);
        store_bytes<F>(to, some, bytes);
      }
    }
}

// The words of 16 * N counters from `first` on, as the numbers of the positions lie.
template <typename F, int N>
MT_INLINE void draw_positions(uint32_t first, const Keys& keys, __m512i (*words)[4]) {
  if (N == 1 || !F::kInterleaved) return draw<N>(first, keys, words);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  words[0][0] = _mm512_add_epi32(every(first), even);
  words[1][0] = _mm512_add_epi32(every(first + 1), even);
  draw_at<2>(keys, words);
}

// Groups that follow each other.
template <typename F>
struct Block {
  const typename F::T* x;
  uint8_t* out;
  int64_t first, count, size;  // the first one's number, how many, and their size
  Group group[kTogether];
};

// Up to 16 * N positions of group `k` and the next one, from `c` on in each slice: where both are
// there and the first one's number is even, they share their draws.
template <int kBits, typename F, bool kStochastic, bool kInside, int N>
MT_INLINE void encode_pair(const Block<F>& b, int64_t k, int64_t c, const Places& p,
                           const Encoding& e) {
  const int64_t slice = b.size / 8, number = b.first + k;
  const auto some = static_cast<__mmask16>(_bzhi_u32(0xFFFF, static_cast<uint32_t>(slice - c)));
  __m512i draws[N][4];
  if (kStochastic)
    draw_positions<F, N>(static_cast<uint32_t>(number / 2 * slice + c), e.keys, draws);
  const int64_t end = std::min(k + 2 - number % 2, b.count);
  for (; k < end; ++k) {
    // The group of an odd number turns the words that it shares (kernels/random/philox.py).
    if (kStochastic && (b.first + k) % 2)
      for (int i = 0; i < N; ++i)
        for (int w = 0; w < 4; ++w) draws[i][w] = _mm512_ror_epi32(draws[i][w], 8);
    const auto* x = b.x + k * b.size + c;
    uint8_t* out = b.out + k * slice * kBits + c;
    encode_positions<kBits, F, kStochastic, kInside, N>(x, out, b.size, draws, b.group[k], p,
                                                        some, e.ahead);
  }
}

template <int kBits, typename F, bool kStochastic, bool kInside>
__attribute__((noinline)) void encode_block(const Block<F>& b, const Places& p, const Encoding& e) {
  const int64_t slice = b.size / 8;
  for (int64_t k = 0; k < b.count; k += 2 - (b.first + k) % 2) {
    int64_t c = 0;
    for (; c + 32 <= slice; c += 32)
      encode_pair<kBits, F, kStochastic, kInside, 2>(b, k, c, p, e);
    if (!kInside)
      for (; c < slice; c += 16) encode_pair<kBits, F, kStochastic, kInside, 1>(b, k, c, p, e);
  }
}

// Words of 5 and 7 bits are too long.
bool can_encode(int64_t bits) { return mt_isa() >= 2 && bits != 5 && bits != 7; }

template <int kBits, typename F, bool kStochastic>
void encode_groups(const typename F::T* x, uint8_t* out, void* bounds, bool wide, int64_t size,
                   int64_t begin, int64_t end, Encoding e) {
  const int64_t bytes = size / 8 * kBits, width = wide ? 8 : 4;
  Places places = places_of(kBits);
  asm("" : "+m"(places));  // for all that GCC knows, other numbers now
  // What is encoded is still in the nearest cache.
  const int64_t together = std::clamp<int64_t>(4096 / size, 2, kTogether);
  for (int64_t g = begin; g < end;) {
    const int count = static_cast<int>(std::min(together - (g & 1), end - g));
    const auto* from = x + g * size;
    uint8_t* to = out + g * bytes;
    const Scales s = scales_of(from, size, count, wide, static_cast<float>((1 << kBits) - 1),
                               static_cast<uint8_t*>(bounds) + g * width);
    e.ahead = g + 2 * count <= end ? count * size : 0;
    Block<F> block;
    block.x = from, block.out = to, block.first = g, block.count = count, block.size = size;
    for (int k = 0; k < count; ++k) set_group(block.group[k], s.base[k], s.inverse[k], places);
    constexpr bool kLimitless = kStochastic && kBits <= 4;  // for what is usual: it is much code
    const uint32_t all = (1u << count) - 1;
    if (kLimitless && size % 256 == 0 && (s.inside & all) == all)
      encode_block<kBits, F, kStochastic, kLimitless>(block, places, e);
    else
      encode_block<kBits, F, kStochastic, false>(block, places, e);
    for (int k = 0; k < count; ++k)
      if (!(s.finite >> k & 1)) std::memset(to + k * bytes, 0, bytes);
    g += count;
  }
}

template <typename F>
void encode_any(const typename F::T* x, uint8_t* out, void* bounds, bool wide, int64_t size,
                int64_t bits, int64_t begin, int64_t end, const Encoding& e) {
  const auto go = [&](auto count) {
    constexpr int kBits = decltype(count)::value;
    e.stochastic ? encode_groups<kBits, F, true>(x, out, bounds, wide, size, begin, end, e)
                 : encode_groups<kBits, F, false>(x, out, bounds, wide, size, begin, end, e);
  };
  if (bits == 1) go(std::integral_constant<int, 1>());
  if (bits == 2) go(std::integral_constant<int, 2>());
  if (bits == 3) go(std::integral_constant<int, 3>());
  if (bits == 4) go(std::integral_constant<int, 4>());
  if (bits == 6) go(std::integral_constant<int, 6>());
  if (bits == 8) go(std::integral_constant<int, 8>());
}

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

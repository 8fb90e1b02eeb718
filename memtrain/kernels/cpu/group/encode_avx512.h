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

// -- what the dtypes differ in: thirty-two positions as two registers, or sixteen as one ----------

struct Floats {
  using T = float;
  using Sixteen = __m512;  // as they lie in memory
  static constexpr bool kInterleaved = false;
  MT_INLINE Sixteen none() { return _mm512_setzero_ps(); }
  MT_INLINE Sixteen load(Sixteen others, __mmask16 some, const T* x) {
    return _mm512_mask_loadu_ps(others, some, x);
  }
  MT_INLINE __m512 widened(Sixteen x) { return x; }
  MT_INLINE void load(const T* x, __m512 (&to)[2]) {
    to[0] = _mm512_loadu_ps(x), to[1] = _mm512_loadu_ps(x + 16);
  }
  MT_INLINE __m512 half_less(__m512 x, __m512 base) {
    return _mm512_sub_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), base);
  }
};

struct Bfloats {
  using T = uint16_t;
  using Sixteen = __m256i;
  static constexpr bool kInterleaved = true;
  MT_INLINE Sixteen none() { return _mm256_setzero_si256(); }
  MT_INLINE Sixteen load(Sixteen others, __mmask16 some, const T* x) {
    return _mm256_mask_loadu_epi16(others, some, x);
  }
  MT_INLINE __m512 widened(Sixteen x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  // The even ones and the odd: a shift and a mask widen them.
  MT_INLINE void load(const T* x, __m512 (&to)[2]) {
    const __m512i both = _mm512_loadu_si512(x);
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    to[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-0x10000)));
  }
  // Rounded once: so is the difference alone, where half of x is exact.
  MT_INLINE __m512 half_less(__m512 x, __m512 base) {
    return _mm512_fmsub_ps(x, _mm512_set1_ps(0.5f), base);
  }
};

// What the lanes of a register have: positions of one group's slice, the first few or all ...
struct Run {
  __mmask16 some;
};

// ... or all positions, few, of the same slice of P groups, one group after the other.
template <int P>
struct Runs {
  __mmask16 of[P];         // each group's lanes; none of one that is not there
  int64_t numbers, bytes;  // from one group to the next, less the lanes between them
};

template <typename F>
MT_INLINE void load(const typename F::T* x, const Run& run, __m512 (&to)[1]) {
  to[0] = F::widened(F::load(F::none(), run.some, x));
}

template <typename F>
MT_INLINE void load(const typename F::T* x, const Run&, __m512 (&to)[2]) {
  F::load(x, to);
}

template <typename F, int P>
MT_INLINE void load(const typename F::T* x, const Runs<P>& runs, __m512 (&to)[1]) {
  auto found = F::none();
#pragma GCC unroll 4
  for (int k = 0; k < P; ++k) found = F::load(found, runs.of[k], x + k * runs.numbers);
  to[0] = F::widened(found);
}

// The lowest bytes of the lanes of one register, or of all lanes of two that F filled.
template <typename F>
MT_INLINE void store_bytes(uint8_t* to, const Run& run, const __m512i (&codes)[1]) {
  _mm_mask_storeu_epi8(to, run.some, _mm512_cvtepi32_epi8(codes[0]));
}

template <typename F, int P>
MT_INLINE void store_bytes(uint8_t* to, const Runs<P>& runs, const __m512i (&codes)[1]) {
  const __m128i bytes = _mm512_cvtepi32_epi8(codes[0]);
#pragma GCC unroll 4
  for (int k = 0; k < P; ++k) _mm_mask_storeu_epi8(to + k * runs.bytes, runs.of[k], bytes);
}

template <typename F>
MT_INLINE void store_bytes(uint8_t* to, const Run&, const __m512i (&codes)[2]) {
  if (F::kInterleaved) {
    const __m512i low = _mm512_set1_epi32(0xFF), odd = _mm512_slli_epi32(codes[1], 8);
    const __m512i both = _mm512_ternarylogic_epi32(low, codes[0], odd, 0xCA);  // a ? b : c
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(both));
  } else {
    for (int i = 0; i < 2; ++i)
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

MT_INLINE __m512 base_of(const Group& group) { return _mm512_set1_ps(group.base); }

MT_INLINE __m512 inverse_of(const Group& group, const Places&, int place) {
  return _mm512_set1_ps(group.inverse[place]);
}

// The same of the groups of `Runs`, lane by lane.
struct Lanes {
  __m512 base, inverse;
};

MT_INLINE __m512 base_of(const Lanes& lanes) { return lanes.base; }

MT_INLINE __m512 inverse_of(const Lanes& lanes, const Places& p, int place) {
  return _mm512_mul_ps(_mm512_set1_ps(p.power[place]), lanes.inverse);
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
template <typename F, bool kStochastic, bool kInside, bool kUpper, typename G>
MT_INLINE __m512i encode(__m512 x, __m512i draws, const G& group, const Places& p, int place) {
  const __m512 u = kStochastic ? uniform<kUpper>(draws, p, place) : _mm512_set1_ps(p.half[place]);
  const __m512 above = F::half_less(x, base_of(group));
  __m512 t = _mm512_add_ps(_mm512_mul_ps(above, inverse_of(group, p, place)), u);
  if (!kInside)
    t = _mm512_min_ps(_mm512_max_ps(t, _mm512_setzero_ps()), _mm512_set1_ps(p.most[place]));
  return _mm512_cvttps_epi32(t);
}

// 16 * N positions of slice S of a group, or of `Runs` of groups, and of the slices after it, which
// share their counters. Adds the codes to `word`; a lane of the packed words is one slice or more.
template <int kBits, typename F, bool kStochastic, bool kInside, int N, bool kShared, int S = 0,
          typename G, typename R>
MT_INLINE void encode_slices(const typename F::T* x, int64_t slice, const __m512i (*draws)[4],
                             const G& group, const Places& p, const R& run, int64_t ahead,
                             __m512i (*word)[N]) {
  constexpr int kSlices = 8 / lanes_of(kBits), kLane = S / kSlices;
  __m512 number[N];
  load<F>(x, run, number);
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
                                                                     p, run, ahead, word);
}

template <int kBits, typename F, bool kStochastic, bool kInside, int N, typename G, typename R>
MT_INLINE void encode_positions(const typename F::T* x, uint8_t* out, int64_t size,
                                const __m512i (*draws)[4], const G& group, const Places& p,
                                const R& run, int64_t ahead) {
  constexpr int kLanes = lanes_of(kBits), kSlices = 8 / kLanes, kBytes = kLanes * kBits / 8;
  static_assert(kLanes * kBits <= 32, "a word has 32 bits");
  constexpr bool kShared = F::kInterleaved && N == 2 && kBytes == 1;  // one word of both registers
  const int64_t slice = size / 8, width = size / kLanes;
  __m512i word[kSlices][N];
  encode_slices<kBits, F, kStochastic, kInside, N, kShared>(x, slice, draws, group, p, run, ahead,
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
        store_bytes<F>(to, run, bytes);
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
  const Run run{static_cast<__mmask16>(_bzhi_u32(0xFFFF, static_cast<uint32_t>(slice - c)))};
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
                                                        run, e.ahead);
  }
}

// P pairs of groups of short slices: `k`, whose number is even, is the first of them. A pair's
// draws follow those of the pair before.
template <int kBits, typename F, bool kStochastic, int P>
MT_INLINE void encode_pairs(const Block<F>& b, int64_t k, const Places& p, const Encoding& e) {
  const int64_t slice = b.size / 8, bytes = slice * kBits;
  __m512i draws[1][4];
  if (kStochastic) draw<1>(static_cast<uint32_t>((b.first + k) / 2 * slice), e.keys, draws);
  for (int odd = 0; odd < 2; ++odd, ++k) {
    if (kStochastic && odd)
      for (auto& words : draws[0]) words = _mm512_ror_epi32(words, 8);
    Runs<P> runs{{}, 2 * b.size - slice, 2 * bytes - slice};
    Lanes lanes{_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) {
      const Group& group = b.group[std::min<int64_t>(k + 2 * j, b.count - 1)];
      const uint32_t own = k + 2 * j < b.count ? ((1u << slice) - 1) << j * slice : 0;
      runs.of[j] = static_cast<__mmask16>(own);
      lanes.base = _mm512_mask_mov_ps(lanes.base, runs.of[j], base_of(group));
      lanes.inverse = _mm512_mask_mov_ps(lanes.inverse, runs.of[j], inverse_of(group, p, 0));
    }
    encode_positions<kBits, F, kStochastic, false, 1>(b.x + k * b.size, b.out + k * bytes, b.size,
                                                      draws, lanes, p, runs, e.ahead);
  }
}

// As `encode_block` of groups whose slices fit a register P times.
template <int kBits, typename F, bool kStochastic, int P>
__attribute__((noinline)) void encode_short(const Block<F>& b, const Places& p, const Encoding& e) {
  int64_t k = b.first % 2;
  if (k) encode_pair<kBits, F, kStochastic, false, 1>(b, 0, 0, p, e);
  for (; k < b.count; k += 2 * P) encode_pairs<kBits, F, kStochastic, P>(b, k, p, e);
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
  const int64_t fit = 128 / size;  // groups whose slices a register has room for
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
    else if (fit >= 4)
      encode_short<kBits, F, kStochastic, 4>(block, places, e);
    else if (fit == 3)
      encode_short<kBits, F, kStochastic, 3>(block, places, e);
    else if (fit == 2)
      encode_short<kBits, F, kStochastic, 2>(block, places, e);
    else
      encode_block<kBits, F, kStochastic, false>(block, places, e);
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

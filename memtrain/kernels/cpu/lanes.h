// Sixteen lanes, compiled once per instruction set: foreach_isa.h includes this file inside a
// namespace, so it has no include guard. F are floats and I are integers; what is theirs alone
// (splat, select, top_of, widen, narrow, root, decode, encode ...) has a file per instruction set.

#if defined(MT_AVX512)
#include "lanes_avx512.h"
#else
#include "lanes_pairs.h"
MT_HELPER float least_of(F v) {
  float x = v[0];
  for (int l = 1; l < 16; ++l) x = v[l] < x ? v[l] : x;
  return x;
}
MT_HELPER float greatest_of(F v) {
  float x = v[0];
  for (int l = 1; l < 16; ++l) x = v[l] > x ? v[l] : x;
  return x;
}
#endif

MT_INLINE I lane_numbers() {
  constexpr int32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I v;
  __builtin_memcpy(&v, kNumbers, sizeof v);
  return v;
}

// Magnitudes compared as integers: NaN is above Inf is above every number.
MT_INLINE I magnitude(F x) { return (I)x & 0x7fffffff; }
MT_INLINE I load(const int32_t* p) { return (I)load(reinterpret_cast<const float*>(p)); }
MT_INLINE void store(int32_t* p, I v) { store(reinterpret_cast<float*>(p), (F)v); }

// To bfloat16, to the nearest, ties to even.
MT_INLINE void store_bfloat(uint16_t* p, F x) {
  const I bits = (I)x, even = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
  narrow(p, (I)select(magnitude(x) < 0x7f800001, (F)even, (F)splat_int(0x7fc0)));
}
MT_INLINE float as_float(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The sign bit of a scale, in each lane.
MT_INLINE I sign_bits(float scale) { return (I)splat(scale) & INT32_MIN; }
MT_INLINE F flipped(F x, I sign) { return (F)((I)x ^ sign); }

// The largest magnitudes of a block's positive and of its negative elements.
struct Extremes {
  I above, below;
};
MT_INLINE void extend(Extremes& e, F x) {
  e.above = imax(e.above, (I)x), e.below = imax(e.below, (I)x ^ (I{} + INT32_MIN));
}

// The scale of a block of n elements: the first element of largest magnitude.
MT_INLINE float largest(const Extremes& e, const float* x, int64_t n) {
  const int32_t above = top_of(e.above), below = top_of(e.below);
  bool first_below = below > above;
  if (__builtin_expect(below == above && above > 0, 0)) {
    int64_t at = 0;
    while (at < n - 1 && x[at] != as_float(above) && x[at] != -as_float(above)) ++at;
    first_below = x[at] < 0.0f;
  }
  return first_below ? -as_float(below) : as_float(above);
}

// A scale of Inf makes every bound NaN, as a NaN does: the codes are 0.
MT_INLINE Codebook scaled(const float* table, float scale) {
  return with_bounds(load(table), load(table + 16) * splat(scale + (scale - scale)));
}

// The row and column vectors of the 128 elements from `from` on (0 past the end).
MT_INLINE void gather(const float* row, const float* col, int64_t from, int64_t rows, int64_t cols,
                      float* r, float* c) {
  const int64_t n = std::max<int64_t>(0, std::min<int64_t>(128, rows * cols - from));
  int64_t i = from / cols, j = from % cols;
  for (int64_t k = 0; k < n; ++i, j = 0) {
    const int64_t run = std::min(cols - j, n - k);
    for (int64_t l = 0; l < run; ++l) r[k + l] = row[i];
    for (int64_t l = 0; l < run; ++l) c[k + l] = col[j + l];
    k += run;
  }
  for (int64_t k = n; k < 128; ++k) r[k] = c[k] = 0.0f;
}

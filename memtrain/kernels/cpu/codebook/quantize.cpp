// Quantisation by a codebook of 2**bits values (definition: kernels/codebook/quantize.py).
#ifndef MT_LANES
#define MT_SELF "codebook/quantize.cpp"
#include <cstring>

#include "halves.h"

namespace memtrain {

// Arguments of both kernels, in the order of `_quantize` in quantize.py.
struct Book {
  float* x;  // read, or written
  const float *bounds, *values;  // bounds: 2**bits - 1, of stochastic codes the values but the
  uint8_t* codes;                // lowest and the highest, and NaN
  float* scale;  // of each block; null: all scales are 1
  int64_t n, block, bits;
  int64_t with_sign;  // whether scales have the sign of the largest element
  int64_t stochastic, seed, threads;
};

template <typename Range>
static void over_blocks(const Book& b, const Range& range) {
  const int64_t blocks = (b.n + b.block - 1) / b.block;
  parallel_for(blocks, std::max<int64_t>(32768 / b.block, 1), b.threads,
               [&](int64_t begin, int64_t end) {
                 std::vector<float> room(b.block + 16);  // vectors reach past a block
                 std::vector<uint8_t> codes(b.block + 16);
                 range(begin, end, room.data(), codes.data());
               });
}

}  // namespace memtrain

#include "foreach_isa.h"

MT_EXPORT void mt_codebook_quantize(const memtrain::Book* call) {
  const memtrain::Book b = *call;
  memtrain::over_blocks(b, [&](int64_t begin, int64_t end, float* room, uint8_t* made) {
    MT_DISPATCH(quantize_book(b, begin, end, room, made));
  });
}

MT_EXPORT void mt_codebook_dequantize(const memtrain::Book* call) {
  const memtrain::Book b = *call;
  memtrain::over_blocks(b, [&](int64_t begin, int64_t end, float* room, uint8_t* packed) {
    MT_DISPATCH(dequantize_book(b, begin, end, room, packed));
  });
}

#else

#include "packing/slices.h"
#include "random/philox.h"

// The largest magnitude; with_sign: with the sign of the first element that has it.
MT_HELPER float largest(const float* x, int64_t n, bool with_sign) {
  I tops = splat_int(0);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) tops = imax(tops, magnitude(load(x + i)));
  int32_t top = top_of(tops);  // as integers: NaN is above Inf is above every number
  for (; i < n; ++i) top = std::max(top, static_cast<int32_t>(bits_of(x[i]) & 0x7FFFFFFF));
  int64_t at = 0;
  while (with_sign && at < n - 1 && static_cast<int32_t>(bits_of(x[at]) & 0x7FFFFFFF) != top) ++at;
  return with_sign && x[at] < 0.0f ? -as_float(top) : as_float(top);
}

// `scaled`: the bounds times the scale. They ascend, so halving finds how many an element passes.
template <int kBits, bool kStochastic>
MT_HELPER void encode_block(const Book& b, const float* x, uint8_t* out, int64_t first,
                            float scale, const float* scaled) {
  const int64_t width = b.block / 8;
  for (int64_t c = 0; c < width; c = next(c, width)) {
    I words[4], codes[8];
    if (kStochastic)
      draw(static_cast<uint32_t>(first + c), static_cast<uint64_t>(b.seed), words);
    for (int s = 0; s < 8; ++s) {
      const F v = load(x + s * width + c);
      I at = splat_int(0);
      for (int step = 1 << (kBits - 1); step > 0; step /= 2) {
        const F bound = look_up(scaled, at + (step - 1));
        at = kStochastic ? at + step - ((v < bound) & step) : at + ((v > bound) & step);
      }
      if (kStochastic) {  // up to the next value where the random number says so
        at = imin(at, splat_int((1 << kBits) - 2));  // no element is below NaN
        const F from = look_up(b.values, at), gap = look_up(b.values, at + 1) - from;
        at = at - (v > (from + uniform(words, s) * gap) * splat(scale));
        at = at & (magnitude(v) < 0x7F800001);  // 0 for NaN
      }
      codes[s] = at;
    }
    store_codes<kBits>(out + c, codes, width);
  }
}

template <int kBits>
inline void quantize_bits(const Book& b, int64_t begin, int64_t end, float* room, uint8_t* made) {
  const int64_t size = b.block, bytes = size / 8 * kBits;
  float scaled[1 << kBits];
  float scale = 1.0f, last = 0.0f;
  for (int64_t k = begin; k < end; ++k) {
    const int64_t at = k * size, n = std::min(size, b.n - at);
    const float* x = b.x + at;
    if (n < size || size < 128) {
      std::memset(room, 0, size * sizeof(float));
      std::memcpy(room, x, n * sizeof(float));
      x = room;
    }
    if (b.scale != nullptr) scale = b.scale[k] = largest(x, size, b.with_sign);
    if (scale < 0.0f) {  // negate the elements and the scale
      for (int64_t i = 0; i < size; ++i) room[i] = -x[i];
      x = room, scale = -scale;
    }
    uint8_t* out = b.codes + k * bytes;
    if (!(scale > 0.0f && scale <= 0x1.fffffep127f)) {
      std::memset(out, 0, bytes);
      continue;
    }
    if (scale != last)
      for (int i = 0; i < (1 << kBits) - 1; ++i) scaled[i] = b.bounds[i] * scale;
    last = scale;
    uint8_t* to = size < 128 ? made : out;
    if (b.stochastic) encode_block<kBits, true>(b, x, to, at / 8, scale, scaled);
    else encode_block<kBits, false>(b, x, to, at / 8, scale, scaled);
    if (to != out) std::memcpy(out, to, bytes);
  }
}

template <int kBits>
inline void dequantize_bits(const Book& b, int64_t begin, int64_t end, float* room,
                            uint8_t* packed) {
  const int64_t size = b.block, width = size / 8, bytes = width * kBits;
  for (int64_t k = begin; k < end; ++k) {
    const int64_t at = k * size, n = std::min(size, b.n - at);
    const uint8_t* in = b.codes + k * bytes;
    if (width < 16) in = static_cast<uint8_t*>(std::memcpy(packed, in, bytes));
    float* out = n < size || width < 16 ? room : b.x + at;
    const F scale = splat(b.scale == nullptr ? 1.0f : b.scale[k]);
    for (int64_t c = 0; c < width; c = next(c, width)) {
      I codes[8];
      load_codes<kBits>(in + c, codes, width);
      for (int s = 0; s < 8; ++s) store(out + s * width + c, look_up(b.values, codes[s]) * scale);
    }
    if (out != b.x + at) std::memcpy(b.x + at, out, n * sizeof(float));
  }
}

inline void quantize_book(const Book& b, int64_t begin, int64_t end, float* room, uint8_t* made) {
  with_bits(b.bits, [&](auto bits) { quantize_bits<bits>(b, begin, end, room, made); });
}

inline void dequantize_book(const Book& b, int64_t begin, int64_t end, float* room,
                            uint8_t* packed) {
  with_bits(b.bits, [&](auto bits) { dequantize_bits<bits>(b, begin, end, room, packed); });
}

#endif

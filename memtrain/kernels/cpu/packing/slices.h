// Codes of sixteen positions of a block's eight slices, and their packed bytes (layout:
// kernels/packing/bits.py). Included once per instruction set, after foreach_isa.h.

constexpr int lanes_of(int bits) { return bits % 2 ? 8 : bits % 4 ? 4 : bits % 8 ? 2 : 1; }

// run(bits) with a constant that equals `bits`.
template <typename Run>
inline void with_bits(int64_t bits, const Run& run) {
  switch (bits) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    case 6: return run(std::integral_constant<int, 6>());
    case 7: return run(std::integral_constant<int, 7>());
    case 8: return run(std::integral_constant<int, 8>());
  }
}

// Where the vectors begin that cover a slice of `width` positions: the last one again has some of
// the one before. The only one of a shorter slice reaches past it.
MT_INLINE int64_t next(int64_t c, int64_t width) {
  return c + 16 < width ? std::min(c + 16, width - 16) : width;
}

// `to` is where these positions of the first slice have their first byte; `width` is a slice's. In
// the order of addresses: what is written past a slice of fewer positions is overwritten.
template <int kBits>
MT_INLINE void store_codes(uint8_t* to, const I* codes, int64_t width) {
  constexpr int kLanes = lanes_of(kBits), kEach = 8 / kLanes;
  MT_UNROLL(8)
  for (int k = 0; k < kLanes * kBits / 8; ++k)
    MT_UNROLL(8)
    for (int h = 0; h < kEach; ++h) {
      I byte = splat_int(0);
      MT_UNROLL(8)
      for (int l = 0; l < kLanes; ++l) {
        const int shift = l * kBits - 8 * k;
        if (shift >= 0 && shift < 8) byte = byte | codes[l * kEach + h] << shift;
        if (shift < 0 && shift > -kBits) byte = byte | codes[l * kEach + h] >> -shift;
      }
      narrow(to + (k * kEach + h) * width, byte);
    }
}

template <int kBits>
MT_INLINE void load_codes(const uint8_t* from, I* codes, int64_t width) {
  constexpr int kLanes = lanes_of(kBits), kEach = 8 / kLanes;
  MT_UNROLL(8)
  for (int h = 0; h < kEach; ++h)
    MT_UNROLL(8)
    for (int l = 0; l < kLanes; ++l) {
      const int k = l * kBits / 8, shift = l * kBits % 8;
      I word = widen(from + (k * kEach + h) * width);
      if (shift + kBits > 8) word = word | widen(from + ((k + 1) * kEach + h) * width) << 8;
      codes[l * kEach + h] = (word >> shift) & ((1 << kBits) - 1);
    }
}

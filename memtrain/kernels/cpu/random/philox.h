// Philox for sixteen counters at once (definition: kernels/random/philox.py). Included once per
// instruction set, after foreach_isa.h.

// The four words of counters first .. first + 15.
MT_HELPER void draw(uint32_t first, uint64_t seed, I* words) {
  I c0 = lane_numbers() + static_cast<int32_t>(first), c1 = splat_int(0), c2 = c1, c3 = c1;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  MT_UNROLL(10)
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    I high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ splat_int(static_cast<int32_t>(k0));
    c2 = high0 ^ c3 ^ splat_int(static_cast<int32_t>(k1));
    c1 = low1, c3 = low0;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// (r + 0.5) / 65536 of slice `s`, 16 bits r each: by the bits of 1 + r / 65536, exactly.
MT_INLINE F uniform(const I* words, int s) {
  const I r = (s % 2 ? words[s / 2] >> 9 : words[s / 2] << 7) & 0x7FFF80;
  return (F)(r | splat_int(0x3F800000)) - splat(1.0f - 0x1p-17f);
}

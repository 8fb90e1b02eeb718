// What sixteen lanes are where no register has eight: GCC splits the vectors by itself. Unrolled and
// inlined, such code would take gigabytes to compile. Included by lanes.h.

typedef uint8_t Bytes __attribute__((vector_size(16)));

#define MT_UNROLL(n) _Pragma("GCC unroll 1")
#define MT_HELPER static __attribute__((noinline, unused))

MT_INLINE F splat(float x) { return F{} + x; }
MT_INLINE I splat_int(int32_t x) { return I{} + x; }
// The second where one is NaN.
MT_INLINE F lesser(F a, F b) { return a < b ? a : b; }
MT_INLINE F greater(F a, F b) { return a > b ? a : b; }
MT_INLINE I to_int(F x) { return __builtin_convertvector(x, I); }
MT_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
// The upper and the lower 32 bits of the products.
MT_HELPER void multiply(I x, uint32_t by, I& high, I& low) {
  for (int l = 0; l < 16; ++l) {
    const uint64_t product = uint64_t{by} * static_cast<uint32_t>(x[l]);
    high[l] = static_cast<int32_t>(product >> 32), low[l] = static_cast<int32_t>(product);
  }
}

MT_HELPER int32_t top_of(I v) {
  int32_t x[16], m;
  __builtin_memcpy(x, &v, sizeof x);
  m = x[0];
  MT_UNROLL(1)
  for (int i = 1; i < 16; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

MT_HELPER I widen(const uint8_t* p) {
  Bytes b;
  __builtin_memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, I);
}

typedef uint16_t Halves __attribute__((vector_size(32)));
MT_HELPER I widen(const uint16_t* p) {
  Halves h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, I);
}

MT_HELPER void narrow(uint16_t* p, I v) {
  Halves h = __builtin_convertvector(v, Halves);
  __builtin_memcpy(p, &h, sizeof h);
}

MT_HELPER void narrow(uint8_t* p, I v) {
  Bytes b = __builtin_convertvector(v, Bytes);
  __builtin_memcpy(p, &b, sizeof b);
}

MT_HELPER F root(F x) {
  for (int i = 0; i < 16; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

// A codebook of 16 values and the 15 bounds between them (times the scale, where one scale
// serves a block).
struct Codebook {
  F values, t;
};

MT_INLINE Codebook with_bounds(F values, F t) { return {values, t}; }

// Only the low 4 bits of an index count.
MT_HELPER F decode(F values, I index) {
  F y;
  MT_UNROLL(1)
  for (int i = 0; i < 16; ++i) y[i] = values[index[i] & 15];
  return y;
}

// The same of four values, four times over: only the low 2 bits of an index count.
MT_INLINE F decode_two_bits(F values, I index) { return decode(values, index); }

// The number of bounds below x; NaN gives 0.
MT_HELPER I encode(const Codebook& book, F x) {
  I c = {};
  MT_UNROLL(1)
  for (int k = 0; k < 15; ++k) c -= x > splat(book.t[k]);
  return c;
}

MT_HELPER F look_up(const float* table, I at) {
  F y;
  MT_UNROLL(1)
  for (int i = 0; i < 16; ++i) y[i] = table[at[i]];
  return y;
}

MT_HELPER I look_up(const uint8_t* table, I at) {
  I y;
  MT_UNROLL(1)
  for (int i = 0; i < 16; ++i) y[i] = table[at[i]];
  return y;
}

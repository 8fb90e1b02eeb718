// Philox for many counters at once: the form that GCC vectorises.
#pragma once

#include "common.h"

// GCC would unroll sixteen turns first and then find no vectors.
#define MT_LOOP _Pragma("GCC unroll 1")

namespace memtrain {

// The words of counters first .. first + N - 1; see kernels/random/philox.py.
template <int N>
MT_INLINE void philox_piece(uint32_t first, uint64_t seed, uint32_t (*__restrict words)[N]) {
  uint32_t c0[N], c1[N], c2[N], c3[N];
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  MT_LOOP for (int i = 0; i < N; ++i) {
    c0[i] = first + static_cast<uint32_t>(i);
    c1[i] = c2[i] = c3[i] = 0;
  }
  for (int round = 0; round < 10; ++round) {
    MT_LOOP for (int i = 0; i < N; ++i) {
      uint64_t p0 = uint64_t{0xD2511F53u} * c0[i], p1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<uint32_t>(p1);
      c3[i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  MT_LOOP for (int i = 0; i < N; ++i) {
    words[0][i] = c0[i], words[1][i] = c1[i];
    words[2][i] = c2[i], words[3][i] = c3[i];
  }
}

}  // namespace memtrain

// What every C++ kernel shares: run-time choice of AVX-512 / AVX2 / portable, threads, Philox.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#define MT_EXPORT extern "C" __attribute__((visibility("default")))
#define MT_INLINE static inline __attribute__((always_inline))

// One source, three compiled forms; the loader picks the best that the machine runs. Put it on
// the function that holds the loops (a lambda inside does not inherit it).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MT_CLONES
#endif

namespace memtrain {

// Runs body(begin, end) over [0, n) on up to `threads` threads. Threads are started per call:
// some 30 us each, and nothing to break across fork(). Pieces are at least `grain` long.
template <typename Body>
void parallel_for(int64_t n, int64_t grain, int64_t threads, const Body& body) {
  int64_t parts = std::min(threads, (n + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  std::vector<std::thread> pool;
  pool.reserve(parts - 1);
  for (int64_t p = 1; p < parts; ++p)
    pool.emplace_back([&, p] { body(n * p / parts, n * (p + 1) / parts); });
  body(int64_t{0}, n / parts);
  for (auto& thread : pool) thread.join();
}

// Philox4x32-10 on one counter (its other three words 0); see kernels/philox.py.
struct Words { uint32_t w[4]; };

MT_INLINE Words philox(uint32_t counter, uint64_t seed) {
  uint32_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace memtrain

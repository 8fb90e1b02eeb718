// What every C++ kernel shares: run-time choice of AVX-512 / AVX2 / portable, and threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#define MT_EXPORT extern "C" __attribute__((visibility("default")))
#define MT_INLINE static inline __attribute__((always_inline))
#define MT_MEMBER inline __attribute__((always_inline))

// Defined in isa.cpp: 0 portable, 1 AVX2, 2 AVX-512; the best of the machine unless limited.
MT_EXPORT int mt_isa();

// One source, three compiled forms; the loader picks the best that the machine runs. Put it on
// the function that holds the loops (a lambda inside does not inherit it).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MT_X86
#define MT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MT_CLONES
#endif

// The OpenMP runtime that torch runs on, where it is GNU's: its threads spin for a while after
// torch's ops, so threads of our own would compete with them for the cores. Null elsewhere.
#if defined(__linux__)
extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));
#endif

namespace memtrain {

// Runs body(part) for every part in [0, parts), each on a thread of its own, all at the same time.
template <typename Body>
void run_together(int64_t parts, const Body& body) {
  std::vector<std::thread> pool;
  for (int64_t p = 1; p < parts; ++p) pool.emplace_back([&, p] { body(p); });
  body(int64_t{0});
  for (auto& thread : pool) thread.join();
}

// Runs body(begin, end) over [0, n) on up to `threads` threads. Pieces are at least `grain` long.
template <typename Body>
void parallel_for(int64_t n, int64_t grain, int64_t threads, const Body& body) {
  const int64_t pieces = (n + grain - 1) / std::max<int64_t>(grain, 1);
  if (threads <= 1 || pieces <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  // More parts than threads: one that has lost its core holds the others up for a part only. Of
  // small work each takes one stretch: what is near in memory then stays in one core's caches.
  const int64_t share = std::clamp<int64_t>(pieces / 32, 1, 8);
  const int64_t parts = std::min(pieces, share * threads), crew = std::min(parts, threads);
  auto piece = [&](int64_t p) { body(n * p / parts, n * (p + 1) / parts); };
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t p = next++; p < parts; p = next++) piece(p);
  };
#if defined(__linux__)
  if (GOMP_parallel != nullptr) {
    auto run = [](void* data) { (*static_cast<decltype(work)*>(data))(); };
    GOMP_parallel(run, &work, static_cast<unsigned>(crew), 0);
    return;
  }
#endif
  run_together(crew, [&](int64_t) { work(); });
}

}  // namespace memtrain

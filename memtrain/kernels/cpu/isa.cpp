// The instruction set that kernels choose at run time, and what the library was built of.
#include "common.h"

namespace {
int isa_limit = 2;
}

MT_EXPORT int mt_isa() {
#ifdef MT_X86
  static const int best = !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2") ? 0
                          : __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                  __builtin_cpu_supports("avx512vl")
                              ? 2
                              : 1;
  return std::min(best, isa_limit);
#else
  return 0;
#endif
}

// Tests run the AVX2 and portable forms on an AVX-512 machine by it.
MT_EXPORT void mt_limit_isa(const int64_t* level) { isa_limit = static_cast<int>(*level); }

// sources.py's digest, which setup.py defines: a library of older sources is not used.
MT_EXPORT const char* mt_sources() { return MT_SOURCES; }

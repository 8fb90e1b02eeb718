// Compiles the file named by MT_SELF once per instruction set, each in a namespace of its own:
// target_clones cannot carry intrinsics, a target pragma can. No include guard on purpose.
#include "common.h"
#ifdef MT_X86
#include <immintrin.h>
#endif

#define MT_LANES
#define MT_TEXT(x) #x
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wunused-function"
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// The vectors are written out: -O3 would only unroll them further, at minutes of compile time.
#pragma GCC push_options
#pragma GCC optimize("O2")
#ifdef MT_X86
#define MT_AVX512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")
namespace memtrain::avx512 {
#include "lanes.h"
#include MT_SELF
}
#undef MT_UNROLL
#undef MT_HELPER
#pragma GCC pop_options
#undef MT_AVX512
#define MT_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,bmi2")
namespace memtrain::avx2 {
#include "lanes.h"
#include MT_SELF
}
#undef MT_UNROLL
#undef MT_HELPER
#pragma GCC pop_options
#undef MT_AVX2
#endif
namespace memtrain::portable {
#include "lanes.h"
#include MT_SELF
}
#undef MT_UNROLL
#undef MT_HELPER
#pragma GCC pop_options

#ifdef MT_X86
#define MT_DISPATCH(call)                      \
  (mt_isa() >= 2   ? memtrain::avx512::call    \
   : mt_isa() == 1 ? memtrain::avx2::call      \
                   : memtrain::portable::call)
#else
#define MT_DISPATCH(call) memtrain::portable::call
#endif

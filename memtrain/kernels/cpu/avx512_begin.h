// Begins a part of a file that is compiled for AVX-512, where there is MT_X86; avx512_end.h ends it.
// No include guard: a file may stand inside another's.
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC diagnostic push
// GCC 12 warns about its own intrinsics' undefined sources.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c")

// Ends what avx512_begin.h began.
#pragma GCC diagnostic pop
#pragma GCC pop_options

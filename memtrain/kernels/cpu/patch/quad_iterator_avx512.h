// Where the values of 4x4 patches lie in maps with one channel: a quad is a row's up to four
// patches side by side.
#pragma once

#include "patch/patch_avx512.h"

#ifdef MT_X86
#include "avx512_begin.h"

namespace memtrain::avx512 {
namespace {

// Four quads. Of one that is not there no patch is stored; it reads what the first one reads.
struct Quads {
  int64_t at[4];       // where each begins among the values
  int64_t first[4];    // the number of its first patch
  int64_t height[4];
  __mmask16 columns[4];
  __mmask8 patches[4];  // a bit each
  bool in_a_row;        // all sixteen patches have consecutive numbers
  bool whole;           // and all their values
};

// Goes through the quads in order.
template <typename Job>
struct QuadIterator {
  const Job& job;
  int64_t quads, band, quad, row, at;
  bool even;  // all quads are whole, and follow each other
  MT_INLINE int64_t quads_of(const Job& job) { return (job.across() + 3) / 4; }

  QuadIterator(const Job& of, int64_t from)
      : job(of), quads(quads_of(of)), even(of.rows % 4 == 0 && of.columns % 16 == 0) {
    band = from / quads, quad = from % quads, row = band % job.down();
    at = band / job.down() * job.rows * job.columns + row * 4 * job.columns;
  }
  void next(Quads& q, int j) {
    const int64_t left = job.columns - quad * 16, patches = job.across() - quad * 4;
    q.at[j] = at + quad * 16;
    q.first[j] = band * job.across() + quad * 4;
    q.height[j] = std::min<int64_t>(job.rows - row * 4, 4);
    q.columns[j] = static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1 << left) - 1);
    q.patches[j] = static_cast<__mmask8>(patches >= 4 ? 15 : (1 << patches) - 1);
    if (++quad < quads) return;
    quad = 0, ++band, at += 4 * job.columns;
    if (++row < job.down()) return;
    row = 0, at += (job.rows - 4 * job.down()) * job.columns;
  }
  MT_INLINE void four_even(QuadIterator& it, Quads& q) {
    const int64_t first = (it.band * it.quads + it.quad) * 4;
    for (int j = 0; j < 4; ++j) {
      q.at[j] = it.at + it.quad * 16, q.first[j] = first + 4 * j;
      q.height[j] = 4, q.columns[j] = 0xFFFF, q.patches[j] = 15;
      if (++it.quad == it.quads) it.quad = 0, ++it.band, it.at += 4 * it.job.columns;
    }
    q.in_a_row = q.whole = true;
  }
  Quads four(int64_t count) {
    Quads q;
    if (even && count >= 4) {
      four_even(*this, q);
      return q;
    }
    for (int j = 0; j < 4; ++j) {
      if (j < count) {
        next(q, j);
        continue;
      }
      q.at[j] = q.at[0], q.first[j] = q.first[0], q.height[j] = q.height[0];
      q.columns[j] = q.columns[0], q.patches[j] = 0;
    }
    q.in_a_row = (q.patches[0] & q.patches[1] & q.patches[2] & q.patches[3]) == 15;
    q.whole = q.in_a_row && (q.columns[0] & q.columns[1] & q.columns[2] & q.columns[3]) == 0xFFFF &&
              (q.height[0] & q.height[1] & q.height[2] & q.height[3]) == 4;
    return q;
  }
};

}  // namespace
}  // namespace memtrain::avx512

#include "avx512_end.h"
#endif

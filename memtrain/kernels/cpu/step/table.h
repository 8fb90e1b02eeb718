// What the fused step's C++ shares: a parameter's row of the table, and what the passes hold of it.
#pragma once

#include "step/weights.h"

namespace memtrain {

enum Rule : int64_t { kAdamW, kSgd, kLion };                // in the order of RULES in update_rules.py
enum Second : int64_t { kAsFirst, kRank1, kFactored };      // SECOND in step.py
constexpr int64_t kFields = 32, kMaxDims = 8;

struct State {
  void* data;      // codes, the state itself, or factored's row means
  float* scale;    // of codes (2 bits: bfloat16), or factored's column means
  const float* codebook;  // values, then the bounds between them; 2 bits: rows
  const uint8_t* buckets;  // 2 bits: columns
};

// One row of the table that Python sends; the order is that of `table` in kernels/step/step.py.
struct Row {
  float* p;  // of p_type, g of g_type: as floats only where both are
  const float* g;
  State state[2];
  const float* scalars;
  int64_t n, rows, cols, rule, bits;  // bits: 0 without a state
  int32_t second, draws;              // draws: whether `drawn` rounds the first state
  int64_t p_type, g_type;
  MasterWeight master;
  int64_t dims, shape[kMaxDims];  // of rank-1 only
  bool direct() const { return p_type == kFloat32 && g_type == kFloat32; }
  int64_t block() const { return bits == 8 ? 256 : 128; }
  int64_t blocks() const { return (n + block() - 1) / block(); }
  bool two_passes() const { return second != kAsFirst; }
};
static_assert(sizeof(Row) == kFields * 8, "the table's rows have 32 fields of 8 bytes");

// A row, and where it works: rank-1's maxima and reciprocals, factored's partial sums and ratios
// (2 bits: their roots, those of the columns in col_next, and reciprocals of both).
struct StepTask : Row {
  float *next = nullptr, *col_next = nullptr, *col_old = nullptr, *row_inv = nullptr,
        *col_inv = nullptr, *partial = nullptr, *ratio = nullptr;
  int64_t chunk = 0;  // of pass 1: blocks (rank-1) or rows (factored)
};

// Blocks of a task whose first state has no 2 bits: blocks.cpp.
void update_blocks(const StepTask& t, int64_t begin, int64_t end);

}  // namespace memtrain

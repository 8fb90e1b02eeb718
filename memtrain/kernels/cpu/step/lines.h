// Numbers of rows and columns for the blocks of a step. Included per instruction set, so it has no
// include guard.

// Of two maxima, which have no sign bit: NaN only where both are.
MT_INLINE F least(F a, F b) { return (F)imin((I)a, (I)b); }

// Row and column of a block's first element, kept by addition: a 64-bit division a block would
// cost a tenth of the step.
struct Place {
  int64_t row, col;
  Place(int64_t first, int64_t cols) : row(first / cols), col(first % cols) {}
  void advance(int64_t cols, int64_t by) {
    for (col += by; col >= cols; col -= cols) ++row;
  }
};

// The numbers of rows and columns of a block's elements, block by block.
template <int64_t kBlock>
struct Lines {
  const StepTask& t;
  Place place;
  int64_t from;  // the block's first element
  bool aligned = t.cols % kBlock == 0;
  const float* col = columns;
  F one = {};  // the row's number, where a block lies in one row
  alignas(64) float row[kBlock], columns[kBlock];
  Lines(const StepTask& task, int64_t block) : t(task), place(block * kBlock, std::max<int64_t>(t.cols, 1)), from(block * kBlock) {}
  MT_MEMBER void find(const float* row_of, const float* col_of) {
    if (aligned) {
      col = col_of + place.col;
      one = splat(row_of[place.row]);
      place.advance(t.cols, kBlock);
    } else {
      for (int64_t i = 0; i < kBlock; i += 128) gather(row_of, col_of, from + i, t.rows, t.cols, row + i, columns + i);
    }
    from += kBlock;
  }
  MT_MEMBER F row_at(int64_t at) const { return aligned ? one : load(row + at); }
};

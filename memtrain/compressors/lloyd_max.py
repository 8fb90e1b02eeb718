"""A first moment in 2 bits, relative to the magnitudes of its rows and columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import STATE, Compressor, Key, Packed
from memtrain.compressors.codebook import Block, why_blocks
from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.step.codecs import ratio


@dataclass(frozen=True, kw_only=True)
class LloydMax(Compressor):
    """Adam's first moment in 2 bits, relative to the root of a factored second moment.

    Codes stand for `{-1.51, -0.4528, 0.4528, 1.51}` times the scale of a block of 128, times
    magnitudes of the element's row and column. A fused step takes the magnitudes from the second
    moment's factors, so that the codes represent Adam's update. `compress` takes the root mean
    squares of the tensor's own rows and columns.

    Each step loses a third of an element's magnitude (0.34 of the root mean square, for normal
    numbers), and nothing decodes to 0. The fused step adds to the weight what the lost part would
    have contributed in later steps. Therefore no other step may write the payload (`fused_only`).
    A NaN or Inf spreads over the whole matrix.

    Memory:
        0.27 bytes per element (2 bits, and 2 bytes per block of 128), and 4 * (rows + columns).

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [-2.0, 4.0]])
        >>> LloydMax().decompress(LloydMax().compress(x, key=Key())).sign()
        tensor([[ 1.,  1.],
                [-1.,  1.]])

    Reference:
        Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory 1960. The
        residual on the weight preserves momentum's auxiliary sequence: Yang, Lin and Li, Unified
        Convergence Analysis of Stochastic Momentum Methods, arXiv:1604.03257.
    """

    parts = ("codes", "scale", "row", "col")
    roles = frozenset({STATE})
    bits = lloyd_max.BITS
    zeros_from_zeros = True
    fused_only = True
    by_rows = "lloyd_max"

    def for_shape(self, shape: torch.Size) -> tuple[Compressor, str]:
        """Return 4-bit blocks of 128 if the vectors would take more bytes."""
        why = why_blocks("Lloyd-Max", shape, sum(shape[:1]) + shape[1:].numel())
        return (Block() if why else self), why

    def for_rows(self, columns: int) -> tuple[Compressor, str]:
        """Return `self` if rows are whole blocks, else 4-bit blocks that restart in each row."""
        if not columns % lloyd_max.BLOCK:
            return self, ""
        instead, why = Block().for_rows(columns)
        return instead, f"no 2 bits for rows that fill no blocks of {lloyd_max.BLOCK}; {why}"

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return tensors `codes`, `scale`, `row` and `col` of `kernels.codebook.lloyd_max`."""
        if x.dim() < 2:
            raise ValueError(f"Lloyd-Max needs at least 2 dimensions, got shape {tuple(x.shape)}")
        square = x.float().square().reshape(x.shape[0], x.shape[1:].numel())
        rows, cols = square.shape
        row, col = square.sum(1) / max(1, cols), square.sum(0) / max(1, rows)
        row = lloyd_max.root(ratio(row, col, row.sum() / max(1, rows)))
        col = lloyd_max.root(col)
        codes, scale = lloyd_max.encode(x, row, col)
        parts = {"codes": codes, "scale": scale, "row": row, "col": col}
        return Packed(parts, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return a contiguous tensor of the original shape and dtype."""
        found = lloyd_max.decode(*(packed.tensors[name] for name in self.parts))
        return found.view(packed.shape).to(packed.dtype)

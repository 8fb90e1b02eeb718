"""Two bits an element of a moment, over the magnitudes of rows and columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import STATE, Compressor, Key, Packed
from memtrain.compressors.codebook import Block, why_blocks
from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.step.codecs import ratio


@dataclass(frozen=True, kw_only=True)
class LloydMax(Compressor):
    """The first moment over the root of a factored second one, in 2 bits: of fused AdamW and Adam.

    Codes stand for `{-1.51, -0.4528, 0.4528, 1.51}` times the scale of their block of 128, times
    magnitudes of the element's row and column. A fused step takes those of the second
    moment's factors, so that what is coded is Adam's update itself; `compress` takes the root mean
    squares of the tensor's own rows and columns.

    A third of an element's magnitude is lost at each step (0.34 of the root mean square, for normal
    numbers), and nothing comes back as 0: a moment stored so, step by step, would be noise. The
    fused step gives to the weight at once what the lost part would have given to it in later steps;
    so only that step may write it (`fused_only`). NaN or Inf spoils the whole matrix.

    Memory:
        0.27 bytes per element (2 bits, and 2 bytes of each 128), and 4 * (rows + columns) bytes.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [-2.0, 4.0]])
        >>> LloydMax().decompress(LloydMax().compress(x, key=Key())).sign()
        tensor([[ 1.,  1.],
                [-1.,  1.]])

    Reference:
        Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory 1960. That
        what is lost goes to the weight leaves the auxiliary sequence of momentum unchanged: Yang,
        Lin and Li, Unified Convergence Analysis of Stochastic Momentum Methods, arXiv:1604.03257.
    """

    parts = ("codes", "scale", "row", "col")
    roles = frozenset({STATE})
    bits = lloyd_max.BITS
    zeros_from_zeros = True
    fused_only = True
    by_rows = "lloyd_max"

    def for_shape(self, shape: torch.Size) -> tuple[Compressor, str]:
        """Return 4-bit blocks of 128 if the vectors would take more bytes."""
        numbers = lambda: shape[0] + shape[1:].numel()  # noqa: E731
        why = why_blocks("Lloyd-Max", shape, numbers)
        return (Block() if why else self), why

    def for_rows(self, columns: int) -> tuple[Compressor, str]:
        """Return `self` if rows fill whole blocks, else 4-bit blocks that restart in each row."""
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
        row = lloyd_max.root(ratio(row, row.sum() / max(1, rows)))
        col = lloyd_max.root(col)
        codes, scale = lloyd_max.encode(x, row, col)
        parts = {"codes": codes, "scale": scale, "row": row, "col": col}
        return Packed(parts, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return a contiguous tensor of the original shape and dtype."""
        found = lloyd_max.decode(*(packed.tensors[name] for name in self.parts))
        return found.view(packed.shape).to(packed.dtype)

"""The factored second moment: row means and column means."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import STATE, Compressor, Key, Packed
from memtrain.compressors.codebook import Block, why_blocks
from memtrain.kernels.step.codecs import ratio
from memtrain.kernels.step.shard import Shard, all_reduce, mean_of, of_columns, of_rows


@dataclass(frozen=True, kw_only=True)
class Factored(Compressor):
    """Row means and column means of a non-negative tensor, seen as [dimension 0, the rest].

    Decodes to `row[i] * col[j] / mean(row)`, exact for tensors of rank one. All zeros decode to
    zeros, never NaN. A NaN or Inf spreads over the whole matrix, since `mean(row)` holds it.

    Attributes:
        factor_dims: `"first"`: dimension 0 and the rest; `"last2"`: the last two, as in the
            original, one matrix for each index of the others. Equal for two dimensions; of
            convolutions' weights `"first"` takes far fewer bytes.

    Raises:
        ValueError: For unknown `factor_dims`, and when compressing a tensor of fewer than 2
            dimensions.

    Memory:
        4 * (rows + columns) bytes for each matrix: 0.002 a element at 4096 x 4096.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
        >>> Factored().decompress(Factored().compress(x, key=Key()))
        tensor([[1., 2.],
                [2., 4.]])

    Reference:
        Shazeer and Stern, Adafactor, arXiv:1804.04235; in 4-bit optimizers: arXiv:2309.01507,
        section 4.3.
    """

    parts = ("row", "col")
    roles = frozenset({STATE})
    signed = False
    second_moment = True
    zeros_from_zeros = True

    factor_dims: str = "first"

    def __post_init__(self) -> None:
        if self.factor_dims not in ("first", "last2"):
            raise ValueError(f"factor_dims={self.factor_dims!r}; allowed: first, last2")

    @property
    def by_rows(self) -> str:
        """The layout by rows, for dimension 0 and the rest."""
        return "factored" if self.factor_dims == "first" else ""

    def for_shape(self, shape: torch.Size) -> tuple[Compressor, str]:
        """Return unsigned blocks of 128 if the vectors would take more bytes."""
        # A matrix's last two dimensions are its first and the rest.
        own = Factored() if len(shape) == 2 else self
        why = why_blocks("factored", shape, lambda: own._numbers(shape))
        return (Block(map="Linear", signed=False) if why else own), why

    def _numbers(self, shape: torch.Size) -> int:
        """Return the number of elements in both vectors."""
        if self.factor_dims == "last2":
            return shape[:-2].numel() * (shape[-2] + shape[-1])
        return shape[0] + shape[1:].numel()

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return row means float32 [shape[0]] and column means float32 [prod(shape[1:])].

        Of `last2`: float32 `[*shape[:-1]]` and `[*shape[:-2], shape[-1]]`.
        """
        if x.dim() < 2:
            raise ValueError(f"factored needs at least 2 dimensions, got shape {tuple(x.shape)}")
        matrix = x.float()
        if self.factor_dims == "first":
            matrix = matrix.reshape(x.shape[0], x.shape[1:].numel())
        if not x.numel():
            row, col = matrix.sum(-1), matrix.sum(-2)
        else:
            row, col = matrix.mean(-1), matrix.mean(-2)
        return Packed({"row": row, "col": col}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return a contiguous tensor of the original shape and dtype."""
        row, col = packed.tensors["row"], packed.tensors["col"]
        return decode(row, col).view(packed.shape).to(packed.dtype)

    def compress_part(self, x: Tensor, *, key: Key, shard: Shard) -> Packed:
        """Compress with the means of the whole tensor; `last2` only if split along dimension 0."""
        if self.factor_dims == "first":
            matrix = x.float().reshape(x.shape[0], x.shape[1:].numel())
            row, col = matrix.sum(1), matrix.sum(0)
            all_reduce([*of_rows(row, shard), *of_columns(col, shard)], "sum")
            whole = torch.Size(shard.shape)
            means = {"row": row / max(1, whole[1:].numel()), "col": col / max(1, whole[0])}
            return Packed(means, x.shape, x.dtype)
        if not shard.by_rows:
            raise ValueError(
                f"{self} of a parameter of shape {shard.shape} that is split along dimensions "
                f"{[dim for dim, _ in shard.groups]}; allowed: 0"
            )
        return self.compress(x, key=key)

    def decompress_part(self, packed: Packed, *, shard: Shard) -> Tensor:
        """Decompress with the mean of the whole tensor's factors."""
        if self.factor_dims != "first":
            return self.decompress(packed)
        row, col = packed.tensors["row"], packed.tensors["col"]
        share = ratio(row, mean_of(row, col, shard))
        return (share.unsqueeze(1) * col).view(packed.shape).to(packed.dtype)


def decode(row: Tensor, col: Tensor) -> Tensor:
    """Return the matrices `row[i] / mean(row) * col[j]`; zeros where the mean is zero."""
    mean = row.mean(-1, keepdim=True) if row.numel() else torch.zeros_like(row)
    return ratio(row, mean).unsqueeze(-1) * col.unsqueeze(-2)

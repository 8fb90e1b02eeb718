"""The paper's other normalisations: per tensor, row, column, both, and blocks of both."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import Key, Packed
from memtrain.compressors.codebook import CodebookCompressor
from memtrain.kernels.codebook.quantize import dequantize_matrix, inverse, quantize_matrix

NORMALISATIONS = ("tensor", "dim0", "dim1", "dim01", "dim10", "rank1-group")


@dataclass(frozen=True, kw_only=True)
class Scaled(CodebookCompressor):
    """Codes of a map, scaled by a tensor's maxima: `tensor/DE`, `dim0/Linear` and their kin.

    Tensors of fewer than two dimensions are quantised in blocks of 128 with the same map, unless
    the normalisation is `tensor`. Zeros decode to zeros, but where another element of the same
    scale is not zero and the map has no zero: then to the lowest value. A NaN or Inf spoils what
    shares a scale with it: the tensor, a row, a column, or both (`rank1-group`: itself alone).

    Attributes:
        normalisation: What shares a scale: `"tensor"`; `"dim0"`, an index of the first dimension
            (a row); `"dim1"`, one of the second dimension (a column); `"dim01"`, first a row, then
            a column of what that leaves (the scales are multiplied), `"dim10"` the other way
            round; `"rank1-group"`, the lesser of the maxima of `group_size` elements along the row
            and along the column (dimensions after the first are flattened).
        map: `"Linear"`, `"DE"`, ..., see `kernels.codebook.values.codebook`.
        bits: 2 to 8.
        signed: Whether negative values are kept.
        rounding: `"nearest"` or `"stochastic"`, as in `Block`.
        group_size: Elements of a group of `rank1-group`.

    Raises:
        ValueError: If a field is out of its range.

    Memory:
        bits / 8 bytes per element, and 4 bytes per scale: 1, shape[0], shape[1], the sum of both,
        or about 2 * numel / group_size. `dim01`, `dim10` and `rank1-group` hold the tensor once
        more in float32 while they work.

    Example:
        >>> rows = Scaled(normalisation="dim0")
        >>> rows.decompress(rows.compress(torch.tensor([[1.0, 0.5], [8.0, 2.0]]), key=Key()))
        tensor([[1.0000, 0.5000],
                [8.0000, 2.0000]])

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 2.2,
        and its code's `dim01`, `dim10` and `rank1-group` (there of two dimensions only).
    """

    parts = ("codes", "scale", "row", "col")

    normalisation: str = "tensor"
    map: str = "Linear"
    bits: int = 4
    signed: bool = False
    rounding: str = "nearest"
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.normalisation not in NORMALISATIONS:
            allowed = ", ".join(NORMALISATIONS)
            raise ValueError(f"normalisation={self.normalisation!r}; allowed: {allowed}")
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}; allowed: 1 or more")
        super().__post_init__()

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Codes uint8 [n_blocks, 128 * bits / 8]; float32 scale, or row and col."""
        if x.dim() < 2 and self.normalisation != "tensor":
            return self._block().compress(x, key=key)
        matrix = _matrix(x)
        if self.normalisation in ("tensor", "dim0", "dim1"):
            scales = {"scale": self._maxima(x)}
            row, col = map(inverse, self._row_and_col(scales["scale"], x.shape))
        else:
            scales, matrix = self._normalised(matrix.float(), x.shape)
            row, col = map(matrix.new_ones, matrix.shape)
        codes = quantize_matrix(matrix, row, col, self._codebook(), self._seed(key))
        return Packed({"codes": codes, **scales}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """A contiguous tensor of the original shape and dtype."""
        shape, tensors = packed.shape, packed.tensors
        if len(shape) < 2 and self.normalisation != "tensor":
            return self._block().decompress(packed)
        if "scale" in tensors:
            row, col = self._row_and_col(tensors["scale"], shape)
            x = dequantize_matrix(tensors["codes"], row, col, self._codebook())
        else:
            row, col = map(tensors["row"].new_ones, _matrix_shape(shape))
            x = dequantize_matrix(tensors["codes"], row, col, self._codebook())
            x = self._denormalised(x, tensors["row"], tensors["col"], shape)
        return x.view(shape).to(packed.dtype)

    def _maxima(self, x: Tensor) -> Tensor:
        if self.normalisation == "tensor":
            return _amax(x.float().abs().reshape(1, -1))
        return _maxima(x, int(self.normalisation == "dim1"))

    def _row_and_col(self, scale: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The scales of rows and columns; Inf, which is no scale, on the other side."""
        rows, cols = _matrix_shape(shape)
        if self.normalisation == "tensor":
            return scale.expand(rows), _none(scale, cols)
        if self.normalisation == "dim0":
            return scale, _none(scale, cols)
        return _none(scale, rows), _spread(scale, shape)

    def _normalised(self, x: Tensor, shape: torch.Size) -> tuple[dict[str, Tensor], Tensor]:
        if self.normalisation == "rank1-group":
            row, col = _amax(_groups(x, self.group_size)), _amax(_groups(x.t(), self.group_size))
            larger = torch.maximum(*self._of_groups(inverse(row), inverse(col), x.shape))
            return {"row": row, "col": col}, x * larger
        if self.normalisation == "dim01":
            row = _amax(x.abs())
            x = x * inverse(row).unsqueeze(1)
            col = _maxima(x.view(shape), 1)
            return {"row": row, "col": col}, x * _spread(inverse(col), shape)
        col = _maxima(x.view(shape), 1)
        x = x * _spread(inverse(col), shape)
        row = _amax(x.abs())
        return {"row": row, "col": col}, x * inverse(row).unsqueeze(1)

    def _denormalised(self, x: Tensor, row: Tensor, col: Tensor, shape: torch.Size) -> Tensor:
        if self.normalisation == "rank1-group":
            return x * torch.fmin(*self._of_groups(row, col, x.shape))
        return x * row.unsqueeze(1) * _spread(col, shape)

    def _of_groups(self, row: Tensor, col: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Values of the groups along rows and of those along columns, for each element."""
        wide = row.repeat_interleave(self.group_size, dim=1)[:, : shape[1]]
        return wide, col.repeat_interleave(self.group_size, dim=1)[:, : shape[0]].t()


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if len(shape) else (1, 1)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(_matrix_shape(x.shape))


def _amax(x: Tensor) -> Tensor:
    """The maxima over the last dimension, 0 of nothing."""
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _maxima(x: Tensor, dim: int) -> Tensor:
    """The largest magnitude at each index of a dimension: float32, [shape[dim]]."""
    apart = x.float().abs().movedim(dim, 0)
    return _amax(apart.reshape(len(apart), apart.shape[1:].numel()))


def _groups(x: Tensor, size: int) -> Tensor:
    """Magnitudes [n, m] in groups along m, zeros in the last one's rest: [n, n_groups, size]."""
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % size))
    return padded.view(x.shape[0], padded.shape[1] // size, size)


def _spread(col: Tensor, shape: torch.Size) -> Tensor:
    """Numbers of the second dimension for every column of the matrix."""
    return col.repeat_interleave(shape[2:].numel())


def _none(like: Tensor, n: int) -> Tensor:
    return like.new_full((1,), torch.inf).expand(n)

"""4x4 patches at 2 bits per value, for feature maps."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.kernels.patch import patch


@dataclass(frozen=True, kw_only=True)
class Patch(Compressor):
    """One of four levels per value in each 4x4 patch of the last two dimensions.

    The levels are the patch's minimum, its maximum and two at equal distances between. A tensor
    with fewer than two dimensions is a map of one row. `decompress` restores any dense order of
    dimensions. Orders in which the rows of a map are directly outside its columns (NCHW,
    channels-last) are read without a copy.

    The error of a value is below a third of its patch's range (stochastic, unbiased) or at most a
    sixth (nearest), besides the rounding of the minimum and the maximum to 16 bits. A NaN or an Inf
    changes no other value and decodes to a bound of its patch. See
    `kernels.patch.patch.patch_quantize`.

    Args:
        rounding: `"nearest"` (the key is unused) or `"stochastic"` (the key gives the seed).

    Memory:
        8 bytes per patch: 0.5 bytes per element of whole patches. Maps of 1x1, and of 1x4 and 2x2
        in 16 bits, take more bytes than before.

    Example:
        >>> x = torch.arange(32.0).view(1, 2, 4, 4)
        >>> packed = Patch().compress(x, key=Key())
        >>> packed.nbytes, Patch().decompress(packed)[0, 1, 0].tolist()
        (16, [16.0, 16.0, 16.0, 21.0])

    Reference:
        Liu Liu, 4x4 Patch Tensor Compression, 2020, and its code in github.com/liuliu/ccv.
    """

    parts = ("words", "order")
    shaped = True
    first_moment = False  # rounding to nearest on an uneven grid is biased

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding={self.rounding!r}; allowed: 'nearest', 'stochastic'")

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Quantise the patches of `x`.

        Returns:
            Tensors `words`, int64 [outer, ceil(rows / 4), ceil(columns / 4), inner], and `order`,
            uint8 [0, dimensions...], whose shape is the order in memory.
        """
        order = _order(x)
        grid, read = _grid(x.shape, order)
        maps = x.detach().permute(read).reshape(grid)
        words = patch.patch_quantize(maps, key.bits(), self.rounding == "stochastic")
        tensors = {"words": words, "order": x.new_empty((0, *order), dtype=torch.uint8)}
        return Packed(tensors, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the tensor with the payload's shape, dtype and order in memory."""
        order = tuple(packed.tensors["order"].shape[1:])
        grid, read = _grid(packed.shape, order)
        values = patch.patch_dequantize(packed.tensors["words"], grid[1], grid[2], packed.dtype)
        x = values.view([packed.shape[dim] for dim in read]).permute(_inverse(read))
        return x if read == order else x.permute(order).contiguous().permute(_inverse(order))


def _map(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor's maps."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def _order(x: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the outermost to the innermost in memory.

    The place of a dimension with one element is free: outside, or beside the other one of its map.
    """
    n = x.dim()
    rows, columns = n - 2, n - 1
    dims = [dim for dim in range(n) if x.shape[dim] != 1]
    # Stable, so that equal strides (of expanded dimensions) keep their order.
    dims.sort(key=lambda dim: -x.stride(dim))
    if n >= 2 and x.shape[rows] == 1:
        dims.insert(dims.index(columns) if columns in dims else len(dims), rows)
    if n >= 1 and x.shape[columns] == 1:
        dims.insert(dims.index(rows) + 1 if n >= 2 else 0, columns)
    return (*(dim for dim in range(n) if dim not in dims), *dims)


def _grid(
    shape: torch.Size, order: tuple[int, ...]
) -> tuple[tuple[int, int, int, int], tuple[int, ...]]:
    """Return [outer, rows, columns, inner], and the order of dimensions for reading."""
    n = len(order)
    if n < 2:
        return (1, *_map(shape), 1), order
    at = order.index(n - 2)
    if order[at + 1 : at + 2] != (n - 1,):
        order, at = tuple(range(n)), n - 2  # rows and columns are not adjacent: copied
    sizes = [shape[dim] for dim in order]
    return (prod(sizes[:at]), *_map(shape), prod(sizes[at + 2 :])), order


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]

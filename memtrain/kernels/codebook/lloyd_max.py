"""A matrix over the magnitudes of its rows and columns, in 2 bits an element: the definition.

An element is `VALUES[code] * scale * (row[i] * col[j])`: the Lloyd-Max quantiser of normal numbers,
of whatever is left when rows' and columns' own magnitudes are divided out. The root mean
square of a block of 128 decides which of the two magnitudes an element takes. The scale is the one
of least squares for that choice, rounded down, so what comes back is never longer than the input
(it is its projection). With the root mean square for a scale, a moment whose elements are of one
size would come back 1.51 times as large, and grow without end.

No value is zero, so nothing is stuck at zero either; whoever stores with it must take care of what
is lost (`PreparedStep` adds it to the weight).
"""

import torch
from torch import Tensor

from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.packing import bits as bitpack

BITS, BLOCK = 2, 128
VALUES = (-1.51, -0.4528, 0.4528, 1.51)
"""The best four values for a normal number of deviation 1: a mean squared error of 0.1175."""
SMALL, LARGE = VALUES[2:]
BOUND = ((SMALL + LARGE) / 2) ** 2
"""Times a block's mean square: elements whose squares are larger have the large magnitude."""
SCALE = torch.bfloat16
"""Eight bits are enough for a scale (its error joins the rest), and none overflows."""


def encode(x: Tensor, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales of `x[i, j] / (row[i] * col[j])`.

    An element whose row or column has no magnitude counts as 0. A block of zeros, and one whose
    scale is no finite number, has scale 0: all of it is lost.

    Args:
        x: Any float type; `len(row) * len(col)` elements, of any shape.
        row: Of rows, float32, at least 0.
        col: The same for columns.

    Returns:
        codes: uint8, [n_blocks, 32], `x` flattened into blocks as `bits.pack` says.
        scale: bfloat16, [n_blocks].

    Example:
        >>> codes, scale = encode(torch.tensor([[3.0, -1.0]]), torch.ones(1), torch.ones(2))
        >>> (codes[0, :2] & 3).tolist(), scale.item()  # (3 * 1.51 + 0.4528) / (1.51**2 + 0.4528**2)
        ([3, 1], 2.0)

    Reference:
        Lloyd, Least Squares Quantization in PCM, 1982; Max, Quantizing for Minimum Distortion,
        1960.
    """
    matrix = x.float().reshape(len(row), len(col))
    # One after the other: the product of both reciprocals may overflow.
    blocks = bitpack.blocks(matrix * inverse(row).unsqueeze(1) * inverse(col), BLOCK)
    starts = torch.arange(len(blocks), device=x.device) * BLOCK
    sizes = (x.numel() - starts).clamp(max=BLOCK)
    square = blocks * blocks
    large = square > BOUND * (_sum(square) / sizes).unsqueeze(1)
    count = large.sum(1, dtype=torch.float32)
    whole = LARGE**2 * count + SMALL**2 * (sizes - count)
    sizes_of_large = torch.where(large, blocks.abs(), 0.0)
    scale = (SMALL * _sum(blocks.abs()) + (LARGE - SMALL) * _sum(sizes_of_large)) / whole
    scale = (scale.view(torch.int32) & -65536).view(torch.float32)  # bfloat16, towards 0
    scale = torch.where(scale.isfinite(), scale, 0.0)
    codes = torch.where(blocks.signbit(), 1 - large.byte(), 2 + large.byte())
    return bitpack.pack(codes, BITS), scale.to(SCALE)


def decode(codes: Tensor, scale: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """The values that codes stand for.

    Args:
        codes: uint8, [n_blocks, 32].
        scale: bfloat16, [n_blocks].
        row: As `encode` took it.
        col: As `encode` took it.

    Returns:
        float32, [rows, columns].

    Example:
        >>> codes, scale = encode(torch.tensor([[3.0, -1.0]]), torch.ones(1), torch.ones(2))
        >>> decode(codes, scale, torch.ones(1), torch.ones(2))
        tensor([[ 3.0200, -0.9056]])
    """
    values = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)[
        bitpack.unpack(codes, BITS)
    ]
    flat = (values * scale.float().unsqueeze(1)).view(-1)[: len(row) * len(col)]
    return flat.view(len(row), len(col)) * (row.unsqueeze(1) * col)


def root(x: Tensor) -> Tensor:
    """The roots of a vector, each the nearest float32: as every kernel has them.

    Args:
        x: float32.

    Returns:
        float32.

    Example:
        >>> root(torch.tensor([4.0]))
        tensor([2.])
    """
    return x.double().sqrt().float()


def _sum(blocks: Tensor) -> Tensor:
    """Of each block, added in the order of the kernels: four quarters, then halves of the rest."""
    one, two, three, four = blocks.split(BLOCK // 4, 1)
    left = one + two + three + four
    while left.shape[1] > 1:
        low, high = left.chunk(2, 1)
        left = low + high
    return left.squeeze(1)

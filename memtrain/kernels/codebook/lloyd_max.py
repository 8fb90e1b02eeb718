"""A matrix over the magnitudes of its rows and columns, in 2 bits per element: the definition.

An element is `VALUES[code] * scale * (row[i] * col[j])`: the Lloyd-Max quantiser of normal numbers,
after rows' and columns' magnitudes are divided out. The root mean square of a block of 128 decides
between the two magnitudes. The scale is that of least squares for this decision, rounded down, so
that the result (a projection) is never longer than the input. With the root mean square as scale, a
moment with elements of one magnitude would grow by 1.51 in each step.

No value is zero, so no element stays at zero. The caller must use the residual (`PreparedStep` adds
it to the weight).
"""

import torch
from torch import Tensor

from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.packing import bits as bitpack

BITS, BLOCK = 2, 128
VALUES = (-1.51, -0.4528, 0.4528, 1.51)
"""The best four values for a normal number of deviation 1, with a mean squared error of 0.1175."""
SMALL, LARGE = VALUES[2:]
BOUND = ((SMALL + LARGE) / 2) ** 2
"""Factor of a block's mean square, above which elements have the large magnitude."""
SCALE = torch.bfloat16
"""Dtype of scales: its eight bits are enough, and none overflows."""


def encode(x: Tensor, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of `x[i, j] / (row[i] * col[j])`.

    An element without a magnitude of its row or column counts as 0. A block of zeros, and a block
    whose scale is not finite, has scale 0. Codes are packed as by `bits.pack`, and scales bfloat16.

    Example:
        >>> codes, scale = encode(torch.tensor([[3.0, -1.0]]), torch.ones(1), torch.ones(2))
        >>> (codes[0, :2] & 3).tolist(), scale.item()  # (3 * 1.51 + 0.4528) / (1.51**2 + 0.4528**2)
        ([3, 1], 2.0)

    Reference:
        Max, Quantizing for Minimum Distortion, 1960.
    """
    matrix = x.float().reshape(len(row), len(col))
    # In two steps: the product of both reciprocals may overflow.
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
    """Invert `encode`: return values, float32 [rows, columns]."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)[
        bitpack.unpack(codes, BITS)
    ]
    flat = (values * scale.float().unsqueeze(1)).view(-1)[: len(row) * len(col)]
    return flat.view(len(row), len(col)) * (row.unsqueeze(1) * col)


def root(x: Tensor) -> Tensor:
    """Return the square roots of a float32 vector, correctly rounded as in every kernel.

    Inf counts as the largest float: the root is finite.
    """
    return x.clamp(max=torch.finfo(torch.float32).max).double().sqrt().float()


def _sum(blocks: Tensor) -> Tensor:
    """Return each block's sum, in the kernels' order: four quarters, then halves of the rest."""
    one, two, three, four = blocks.split(BLOCK // 4, 1)
    left = one + two + three + four
    while left.shape[1] > 1:
        low, high = left.chunk(2, 1)
        left = low + high
    return left.squeeze(1)

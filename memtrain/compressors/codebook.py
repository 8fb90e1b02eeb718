"""Block compressors: a codebook, and one scale per block."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.identity import Identity
from memtrain.kernels.codebook.quantize import dequantize_blocks, quantize_blocks
from memtrain.kernels.codebook.values import Codebook, codebook

ROUNDINGS = ("nearest", "stochastic")
MAX_VECTOR_BYTES = 0.08
"""Limit of the bytes per element of the vectors of rank-1 and factored states."""
MAX_ROW_BYTES = 2.0
"""Limit of the bytes per element of blocks that restart in each row."""


def why_blocks(kind: str, shape: torch.Size, numbers: int) -> str:
    """Return why blocks replace the float32 `numbers` of vectors along dimensions, or ""."""
    if len(shape) < 2:
        return f"{kind} needs 2 dimensions, the parameter has {len(shape)}: block instead"
    cost = 4 * numbers / shape.numel() if shape.numel() else 0.0
    if cost <= MAX_VECTOR_BYTES:
        return ""
    return f"{kind} vectors would cost {cost:.2f} bytes per parameter: block instead"


@dataclass(frozen=True, kw_only=True)
class Block(Compressor):
    """Blocks of codes with one scale each: `B128/DE` and its family.

    Zeros decode to zeros. A NaN or Inf affects its own block only: the block decodes to NaN, or to
    the codebook's lowest value times Inf if its scale is Inf.

    Attributes:
        block_size: Elements per scale, a multiple of 8.
        map: `"DE"`, `"DE-0"`, `"Linear"`, `"Power-2"`, `"E2M1"` ..., see `values.codebook`.
        bits: Bits per code, 2 to 8.
        signed: Whether negative values are kept. Unsigned maps round them to the lowest value.
        rounding: `"nearest"`, ties to the lower value; or `"stochastic"`, to one of the two
            neighbouring values. The mean over keys is then the tensor, within 2**-16 of their
            distance. Exception: a signed scale has the sign of the block's largest element, and an
            element of the other sign beyond the map's lowest value (DE, 4 bits: 0.8875 times the
            scale) becomes that value. A momentum is 1.2% shorter for that, in any dtype.
        columns: Elements per row of dimension 0, if blocks restart in each row: the payload is then
            independent of a split of rows. A row has the same number of blocks as without, and the
            last block is padded. 0: blocks cross rows.

    Raises:
        ValueError: If a field is out of its range.

    Memory:
        bits / 8 + 4 / block_size bytes per element (0.53 at 4 bits and 128), in whole blocks.

    Example:
        >>> import torch
        >>> block = Block()
        >>> block.decompress(block.compress(torch.tensor([1.0, -0.5, 0.0]), key=Key()))
        tensor([ 1.0000, -0.4375,  0.0000])
        >>> x, rows = torch.randn(6, 77), Block(columns=77)
        >>> whole, part = (rows.compress(t, key=Key()).tensors["codes"] for t in (x, x[2:]))
        >>> rows.size, torch.equal(whole[2:], part)
        (80, True)

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
    """

    parts = ("codes", "scale")
    zeros_from_zeros = True
    by_rows = "block"

    block_size: int = 128
    map: str = "DE"
    bits: int = 4
    signed: bool = True
    rounding: str = "nearest"
    columns: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.block_size < 8 or self.block_size % 8:
            raise ValueError(f"block_size must be a multiple of 8 from 8 on, got {self.block_size}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding={self.rounding!r}; allowed: {', '.join(ROUNDINGS)}")
        codebook(*self.book)

    @property
    def second_moment(self) -> bool:
        """Whether the lowest value of the codebook is above 0."""
        return codebook(*self.book)[0] > 0

    @property
    def book(self) -> Codebook:
        """The codebook."""
        return Codebook(self.map, self.bits, self.signed)

    def seed(self, key: Key) -> int | None:
        """Return the seed of stochastic rounding, or None for rounding to nearest."""
        return key.bits() if self.rounding == "stochastic" else None

    @property
    def size(self) -> int:
        """Elements per block, a multiple of 8; in rows as few as their number of blocks allows."""
        if not self.columns:
            return self.block_size
        return -(-self.columns // (8 * self._blocks)) * 8

    @property
    def _blocks(self) -> int:
        """Return the blocks of a row."""
        return -(-self.columns // self.block_size)

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return codes uint8 [n_blocks, size * bits / 8] and scale float32 [n_blocks]."""
        if self.columns:
            missing = self._blocks * self.size - self.columns
            rows = x.reshape(x.numel() // self.columns, self.columns)
            whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
        else:
            whole = x
        seed = self.seed(key)
        codes, scale = quantize_blocks(whole, self.book, block_size=self.size, seed=seed)
        return Packed({"codes": codes, "scale": scale}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return a contiguous tensor of the original shape and dtype."""
        codes, scale = packed.tensors["codes"], packed.tensors["scale"]
        if not self.columns:
            flat = dequantize_blocks(codes, scale, self.book, numel=packed.shape.numel())
        else:
            width, rows = self._blocks * self.size, packed.shape.numel() // self.columns
            whole = dequantize_blocks(codes, scale, self.book, numel=rows * width)
            flat = whole.view(rows, width)[:, : self.columns].contiguous()
        return flat.view(packed.shape).to(packed.dtype)

    def for_rows(self, columns: int) -> tuple[Compressor, str]:
        """Return `self` if rows are whole blocks, else blocks that restart in each row.

        Rows for which such blocks take too many bytes are kept: `Identity`.
        """
        if self.columns or not columns % self.block_size:
            return self, ""
        split = replace(self, columns=columns)
        if split._blocks * (split.size * split.bits / 8 + 4) <= MAX_ROW_BYTES * columns:
            why = f"split over processes: blocks begin anew in each row of {columns} elements"
            return split, why
        return Identity(), f"kept: split over processes by rows of {columns} elements, too few"

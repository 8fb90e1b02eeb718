"""Reference encoders and decoders for optimizer states."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.codebook import lloyd_max, rank1
from memtrain.kernels.codebook.quantize import (
    dequantize_blocks_reference,
    encode_drawn,
    largest,
    quantize_blocks_reference,
)
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.packing import bits as bitpack

ROWS_AND_COLUMNS = ("rank1", "factored")
"""Kinds with scales or means of rows and columns: a step reads the whole tensor twice."""
BLOCKS = {4: 128, 8: 256}
"""Bits of a code -> elements of a block, which share a scale (rank-1: only a layout)."""
CODEBOOKS8 = ("DE", "DE-0")
"""Codebooks of 8 bits: no bucket of `upper_buckets` has two of their bounds."""
MANTISSA = {4: 4, 8: 7}
"""Bits of a code -> bits of a value's mantissa that select its bucket (`upper_buckets`)."""

Payload = Mapping[str, Tensor]


class Codec(NamedTuple):
    """How one state is kept.

    `kind`: `"exact"` (`{"tensor": float32}`), `"block"` (`{"codes", "scale"}`, an abs-max scale for
    each block), `"rank1"` (the same, the scales being maxima of rows and columns; at least 2
    dimensions), `"factored"` (`{"row", "col"}`: means; at least 2 dimensions) or `"lloyd_max"`
    (`{"codes", "scale", "row", "col"}`: 2 bits, as `codebook.lloyd_max` says; rows and columns are
    roots of the factors of the second state).

    Example:
        >>> Codec("block", 4, "DE").sizes(torch.Size((2, 100)))
        {'codes': 128, 'scale': 2}
    """

    kind: str = "exact"
    bits: int = 32
    codebook: str = "DE"
    signed: bool = True
    drawn: bool = False
    """Whether `update_rules.drawn` rounds the codes, which have 4 bits."""

    @property
    def block(self) -> int:
        """Elements of a block."""
        return BLOCKS.get(self.bits, 128)

    def sizes(self, shape: torch.Size) -> dict[str, int]:
        """Elements of each tensor of a payload, in the order of the kernels' table."""
        n = shape.numel()
        if self.kind == "exact":
            return {"tensor": n}
        if self.kind == "factored":
            return {"row": shape[0], "col": shape[1:].numel()}
        n_blocks = -(-n // self.block)
        codes = n_blocks * self.block * self.bits // 8
        if self.kind == "lloyd_max":
            vectors = {"row": shape[0], "col": shape[1:].numel()}
            return {"codes": codes, "scale": n_blocks, **vectors}
        return {"codes": codes, "scale": sum(shape) if self.kind == "rank1" else n_blocks}

    def is_served(self, *, first: bool) -> bool:
        """Whether the kernels have this codec, of a rule's first (signed) or second state."""
        kinds = {"exact": (32,), "block": tuple(BLOCKS), "rank1": (4,), "factored": (32,)}
        if self.bits not in (kinds | {"lloyd_max": (lloyd_max.BITS,)}).get(self.kind, ()):
            return False
        if self.kind in ("block", "rank1") and self.signed is not first:
            return False
        if self.drawn and (self.kind, self.bits) != ("block", 4):
            return False
        return self.bits != 8 or self.codebook in CODEBOOKS8

    def decode(self, state: Payload, shape: torch.Size) -> Tensor:
        """Return the state in float32 (exact: as it is), of the parameter's shape."""
        if self.kind == "exact":
            return state["tensor"]
        if self.kind == "lloyd_max":
            parts = (state["codes"], state["scale"], state["row"], state["col"])
            return lloyd_max.decode(*parts).view(shape)
        book = Codebook(self.codebook, self.bits, self.signed)
        if self.kind == "rank1":
            return rank1.dequantize(state["codes"], state["scale"], book, shape=shape)
        flat = dequantize_blocks_reference(state["codes"], state["scale"], book, shape.numel())
        return flat.view(shape)

    def encode(
        self, state: Payload, new: Tensor, scale: Tensor | None = None, u: Tensor | None = None
    ) -> None:
        """Write a new value into the payload.

        `scale` is rank-1's, of the whole tensor. `u` as in `encode_drawn`, for stochastic blocks.
        """
        if self.kind == "exact":
            state["tensor"].copy_(new)
            return
        book = Codebook(self.codebook, self.bits, self.signed)
        if u is not None:
            blocks = bitpack.blocks(new.float(), self.block)
            scale = largest(blocks, signed=self.signed)
            drawn = encode_drawn(blocks, scale.unsqueeze(1), book, bitpack.blocks(u, self.block))
            codes = bitpack.pack(drawn, self.bits)
        elif scale is None:
            codes, scale = quantize_blocks_reference(new, book, self.block)
        else:
            codes = rank1.encode(new, scale, book)
        state["codes"].copy_(codes)
        state["scale"].copy_(scale)


EXACT = Codec()
FACTORED = Codec("factored", signed=False)
LLOYD_MAX = Codec("lloyd_max", lloyd_max.BITS)


def ratio(row: Tensor, col: Tensor, mean: Tensor) -> Tensor:
    """Return row means over their mean, and zero where the mean is zero.

    If a mean of squares has overflowed, the ratios are the largest float: no element moves.
    """
    overflowed = (col == torch.inf).any() | (mean == torch.inf)
    most = torch.finfo(torch.float32).max
    found = (row / mean).masked_fill(mean == 0, 0.0).clamp(max=most)
    return found.masked_fill(overflowed, most)


@cache
def codebook_and_bounds(codec: Codec, device: torch.device) -> Tensor:
    """Return a codebook for kernels: float32, 2**bits values, the bounds between them, +Inf."""
    book, cpu = Codebook(codec.codebook, codec.bits, codec.signed), torch.device("cpu")
    values = book.values(cpu)
    found = torch.cat([values, book.midpoints(cpu), values.new_tensor([float("inf")])])
    return found.to(device)  # at once: other streams read it too


@cache
def upper_buckets(codec: Codec, device: torch.device) -> Tensor:
    """Return the number of codebook bounds below each bucket of float32 values from -1 to 1.

    A bucket has the values that share sign, exponent and `MANTISSA` bits, and at most one bound, so
    one comparison with the next bound gives a value's code. Edges are moved out by 2**-20: the
    bucket may be that of a rounded value.

    The result is uint8, or for 4 bits int64 with the next bound in the upper half: [2 * n], by a
    value's upper bits as a signed integer, plus n / 2. NaN gets 0. The last n values are 0, for
    blocks without a scale.

    Example:
        >>> found = upper_buckets(Codec("block", 4, "DE"), torch.device("cpu"))
        >>> (found & 15).unique().numel()
        16
    """
    shift, cpu = 23 - MANTISSA[codec.bits], torch.device("cpu")
    bounds = Codebook(codec.codebook, codec.bits, codec.signed).midpoints(cpu)
    edges = torch.arange((1 << (31 - shift)) + 1, dtype=torch.int64, device=cpu) << shift
    edges = edges.clamp(max=0x7F7FFFFF).int().view(torch.float32).double()  # no Inf among them
    above = torch.searchsorted(bounds.double(), edges[:-1] * (1 - 2.0**-20))
    below = torch.searchsorted(bounds.double(), -edges[1:] * (1 + 2.0**-20))
    starts = torch.cat([below, above])
    nan = 0x7F800000 >> shift  # the bucket of Inf; those above are of NaN
    starts[nan + 1 : len(below)] = 0
    starts[len(below) + nan + 1 :] = 0
    if codec.bits == 4:
        inf, zero = bounds.new_tensor([float("inf")]), bounds.new_zeros(1)
        following = torch.cat([bounds, inf])[starts].view(torch.int32).long() << 32
        nothing = (zero / zero).view(torch.int32).long() << 32
        return torch.cat([starts | following, nothing.expand_as(starts)]).to(device)
    return torch.cat([starts, torch.zeros_like(starts)]).to(device, torch.uint8)

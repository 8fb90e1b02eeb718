"""Blocks of codes: one abs-max scale a block, and a code book of 2**bits values in [-1, 1]."""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from memtrain.kernels import bits as bitpack
from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, register

MAPS = ("DE", "DE-0", "Linear")


@cache
def codebook(map: str, *, bits: int = 4, signed: bool) -> tuple[float, ...]:
    """The ascending values that codes stand for, before the scale.

    Args:
        map: `"DE"` (dynamic exponent: each decade below 1 holds twice the values of the decade
            under it), `"DE-0"` (unsigned DE whose zero is replaced by the smallest value) or
            `"Linear"` (unsigned: k / 2**bits from k = 1, so no zero; signed: even on [-1, 1]).
        bits: 2 to 8.
        signed: Whether negative values are needed. Signed DE has +1 and no -1.

    Returns:
        2**bits values.

    Raises:
        ValueError: If the map is unknown, or DE-0 is asked for with a sign.

    Example:
        >>> codebook("DE", signed=True)[:3]
        (-0.8875, -0.6625, -0.4375)
        >>> codebook("Linear", bits=2, signed=False)
        (0.25, 0.5, 0.75, 1.0)

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861 (DE);
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507 (DE-0, Linear).
    """
    if map not in MAPS:
        raise ValueError(f"map {map!r} is unknown; allowed: {', '.join(MAPS)}")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be 2 to 8, got {bits}")
    if map == "DE-0" and signed:
        raise ValueError("map 'DE-0' has no sign: allowed with signed=False only")
    if map == "Linear":
        size = 2**bits
        if signed:
            return tuple(2 * k / (size - 1) - 1 for k in range(size))
        return tuple((k + 1) / size for k in range(size))
    values = _dynamic_exponent(bits, signed)
    return values if map == "DE" else (values[1], *values[1:])


def _dynamic_exponent(bits: int, signed: bool) -> tuple[float, ...]:
    exponents = bits - 1
    values = [0.0, 1.0]
    for i in range(exponents):
        cells = 2 ** (i + (not signed))
        for k in range(cells):
            # the middle of cell k of [0.1, 1], in units that keep the decimals short
            middle = (2 * cells + 9 * (2 * k + 1)) / (20 * cells)
            values.append(middle / 10 ** (exponents - 1 - i))
    if signed:
        values += [-v for v in values if 0 < v < 1]
    return tuple(sorted(values))


@cache
def qmap(map: str, bits: int, signed: bool, device: torch.device) -> Tensor:
    """The code book as float32 [2**bits] on a device; made once."""
    return torch.tensor(codebook(map, bits=bits, signed=signed), device=device)


@cache
def midpoints(map: str, bits: int, signed: bool, device: torch.device) -> Tensor:
    """The bounds between neighbouring values, float32 [2**bits - 1], on a device; made once."""
    values = codebook(map, bits=bits, signed=signed)
    middle = [(a + b) / 2 for a, b in pairwise(values)]
    return torch.tensor(middle, device=device)


@cache
def table(map: str, signed: bool, device: torch.device) -> Tensor:
    """What the 4-bit kernels read: float32 [32], the 16 values, then the 15 midpoints and +Inf."""
    end = torch.tensor([float("inf")], device=device)
    return torch.cat([qmap(map, 4, signed, device), midpoints(map, 4, signed, device), end])


def count_above(x: Tensor, bounds: Tensor) -> Tensor:
    """How many of the ascending `bounds` are below each x: the nearest code, ties to the lower.

    Args:
        x: float32, [n, m].
        bounds: float32, [k] or [n, k]. NaN in `x` or `bounds` gives 0.

    Returns:
        int64, [n, m].
    """
    codes = torch.searchsorted(bounds, x.contiguous())
    nan = x.isnan() | bounds.isnan().any(-1, keepdim=True)
    return codes.masked_fill(nan, 0)


def quantize(
    x: Tensor, *, map: str, bits: int, signed: bool, block_size: int
) -> tuple[Tensor, Tensor]:
    """Quantise `x` to the nearest value of a code book, with one abs-max scale per block.

    `x` is flattened and padded with zeros to whole blocks. An element's code is the number of
    midpoints with `x > midpoint * scale`: nearest, ties to the lower index. A block of zeros gets
    scale 0 and codes 0, which decode to 0. NaN or Inf makes its block's scale NaN or Inf; that
    block decodes to NaN and Inf, the others are exact.

    Args:
        x: Any shape and device; float32, or any float type (converted).
        map: A name of `MAPS`.
        bits: 2 to 8.
        signed: Which form of the map.
        block_size: Elements per scale, a multiple of 8; the C++ kernel serves multiples of 32,
            the Triton kernel powers of two.

    Returns:
        codes: uint8, [n_blocks, block_size * bits / 8], packed as `bits.pack` says.
        scale: float32, [n_blocks].

    Memory:
        bits / 8 + 4 / block_size bytes per element, plus the padding of the last block.

    Example:
        >>> codes, scale = quantize(
        ...     torch.ones(256), map="DE", bits=4, signed=True, block_size=128)
        >>> codes.shape, scale
        (torch.Size([2, 64]), tensor([1., 1.]))

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 2.2.
    """
    return _QUANTIZE(x, map, bits, signed, block_size)


def dequantize(
    codes: Tensor, scale: Tensor, *, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    """The inverse of `quantize`: `value[code] * scale`.

    Args:
        codes: uint8, [n_blocks, block_size * bits / 8].
        scale: float32, [n_blocks].
        map: As in `quantize`.
        bits: As in `quantize`.
        signed: As in `quantize`.
        numel: Elements without the padding.

    Returns:
        float32, [numel].

    Example:
        >>> codes, scale = quantize(
        ...     torch.tensor([0.5, 2.0]), map="Linear", bits=4, signed=False, block_size=128)
        >>> dequantize(codes, scale, map="Linear", bits=4, signed=False, numel=2)
        tensor([0.5000, 2.0000])
    """
    return _DEQUANTIZE(codes, scale, map, bits, signed, numel)


def quantize_reference(
    x: Tensor, map: str, bits: int, signed: bool, block_size: int
) -> tuple[Tensor, Tensor]:
    """`quantize` in pure torch."""
    blocks = bitpack.blocks(x.float(), block_size)
    scale = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(blocks.shape[0])
    bounds = midpoints(map, bits, signed, x.device) * scale.unsqueeze(1)
    return bitpack.pack(count_above(blocks, bounds), bits), scale


def dequantize_reference(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    """`dequantize` in pure torch."""
    values = qmap(map, bits, signed, codes.device)[bitpack.unpack(codes, bits)]
    return (values * scale.unsqueeze(1)).view(-1)[:numel]


def _quantize(
    x: Tensor, map: str, bits: int, signed: bool, block_size: int
) -> tuple[Tensor, Tensor]:
    backend = choose(x)
    if bits != 4 or backend == "reference" or (backend == "cpu" and block_size % 32):
        return quantize_reference(x, map, bits, signed, block_size)
    n_blocks = -(-x.numel() // block_size)
    codes = torch.empty(n_blocks, block_size // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(n_blocks, device=x.device)
    tables = table(map, signed, x.device)
    if backend == "cpu":
        x = x.float().contiguous()
        cpu.call("mt_codebook_quantize", x, tables, codes, scale, x.numel(), block_size)
    else:
        from memtrain.kernels import codebook_triton

        codebook_triton.quantize(x.contiguous(), tables, codes, scale)
    return codes, scale


def _dequantize(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    backend = choose(codes)
    block_size = codes.shape[1] * 8 // bits
    if bits != 4 or backend == "reference" or (backend == "cpu" and block_size % 32):
        return dequantize_reference(codes, scale, map, bits, signed, numel)
    out = torch.empty(numel, device=codes.device)
    tables = table(map, signed, codes.device)
    if backend == "cpu":
        codes, scale = codes.contiguous(), scale.contiguous()
        cpu.call("mt_codebook_dequantize", codes, scale, tables, out, numel, block_size)
    else:
        from memtrain.kernels import codebook_triton

        codebook_triton.dequantize(codes.contiguous(), scale.contiguous(), tables, out)
    return out


def _quantize_fake(
    x: Tensor, map: str, bits: int, signed: bool, block_size: int
) -> tuple[Tensor, Tensor]:
    n_blocks = (x.numel() + block_size - 1) // block_size
    codes = x.new_empty(n_blocks, block_size * bits // 8, dtype=torch.uint8)
    return codes, x.new_empty(n_blocks, dtype=torch.float32)


def _dequantize_fake(
    codes: Tensor, scale: Tensor, map: str, bits: int, signed: bool, numel: int
) -> Tensor:
    return scale.new_empty(numel)


_QUANTIZE = register(
    "codebook_quantize(Tensor x, str map, int bits, bool signed, SymInt block_size) "
    "-> (Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)
_DEQUANTIZE = register(
    "codebook_dequantize(Tensor codes, Tensor scale, str map, int bits, bool signed, "
    "SymInt numel) -> Tensor",
    _dequantize,
    _dequantize_fake,
)

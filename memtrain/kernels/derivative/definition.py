"""Few-bit derivative codes in plain torch: the definition (contract: `derivative.py`)."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from memtrain.kernels.packing import bits as bit_layout

BLOCK_SIZE = 256
PARITIES = ("plain", "even", "band")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # C++ knows their places
_SIZES = tuple(2**bits for bits in range(1, 9))


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `TypeError` where codes are not made of such tensors."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype {dtype} is not allowed; allowed: {', '.join(map(str, DTYPES))}")


def check_side(dtype: torch.dtype, boundaries: Sequence[float], parity: str) -> None:
    """Raise where codes cannot be made of such a tensor so."""
    check_dtype(dtype)
    if parity not in PARITIES:
        raise ValueError(f"parity {parity!r} is unknown; allowed: {', '.join(PARITIES)}")
    code_bits(boundaries, parity)


def code_bits(boundaries: Sequence[float], parity: str) -> int:
    """Bits of the codes that these boundaries give."""
    if parity != "band":
        return bits_of(len(boundaries), 1)
    if len(boundaries) != 2:
        raise ValueError(f"{len(boundaries)} boundaries given; allowed with parity 'band': 2")
    return 1


def bits_of(count: int, missing: int) -> int:
    """Bits of the codes behind 2**bits - `missing` numbers."""
    if count + missing not in _SIZES:
        allowed = ", ".join(str(size - missing) for size in _SIZES)
        raise ValueError(f"{count} boundaries or levels given; allowed: {allowed}")
    return (count + missing).bit_length() - 1


@cache
def numbers(values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A table on the CPU; float32's subnormals become 0, so that no unit can flush them."""
    table = torch.tensor(values, dtype=dtype, device="cpu")
    return torch.where(table.abs() < torch.finfo(torch.float32).tiny, 0.0, table)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What products with a tensor of `dtype` are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def encode_reference(x: Tensor, boundaries: Sequence[float], parity: str, shift: float) -> Tensor:
    """The codes of `x`, in logical order."""
    side = bit_layout.blocks(x.float(), BLOCK_SIZE) - shift
    side = side.abs() if parity == "even" else side
    table = numbers(tuple(boundaries)).tolist()
    if parity == "band":
        codes = ((side > table[0]) & (side <= table[1])).long()
    else:
        codes = torch.zeros_like(side, dtype=torch.int64)
        for boundary in table:
            codes += side > boundary
    return bit_layout.pack(codes, code_bits(boundaries, parity))


def decode_reference(codes: Tensor, levels: Sequence[float], n: int, dtype: torch.dtype) -> Tensor:
    """The level of each code."""
    index = bit_layout.unpack(codes, bits_of(len(levels), 0)).view(-1)[:n]
    return numbers(tuple(levels), wide(dtype)).to(codes.device)[index].to(dtype)


def backward_reference(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    """`grad` times the level of each code."""
    level = decode_reference(codes, levels, grad.numel(), wide(grad.dtype)).view_as(grad)
    return (grad.to(level.dtype) * level).to(grad.dtype)

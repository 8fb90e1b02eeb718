"""Codes of 1 to 8 bits packed to the bit, in the layout of all kernels.

A block of `block_size` codes has `lanes = 8 / gcd(8, bits)` contiguous lanes of `width` codes. The
codes at position `c` of all lanes form one little-endian word, lane 0 in its lowest bits. Byte `k`
of that word is byte `k * width + c` of the block. Loads and stores are contiguous for every width.
4 bits in blocks of 128 give the usual nibble layout: byte `j` contains elements `j` (low) and
`j + 64` (high).
"""

from math import gcd

import torch
from torch import Tensor


def lanes(bits: int) -> int:
    """Return the lanes of a block: the fewest codes that fill whole bytes.

    Example:
        >>> [lanes(bits) for bits in range(1, 9)]
        [8, 4, 8, 2, 8, 4, 8, 1]
    """
    return 8 // gcd(8, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers below 2**bits, [n_blocks, size], to uint8 [n_blocks, size * bits / 8].

    Example:
        >>> pack(torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1]]), 1)
        tensor([[129]], dtype=torch.uint8)
    """
    n, size = codes.shape
    count = lanes(bits)
    lane = codes.to(torch.int64).view(n, count, size // count)
    shift = torch.arange(count, device=codes.device).view(1, -1, 1) * bits
    word = (lane << shift).sum(1)
    n_bytes = count * bits // 8
    byte = torch.arange(n_bytes, device=codes.device).view(1, -1, 1) * 8
    return ((word.unsqueeze(1) >> byte) & 0xFF).to(torch.uint8).reshape(n, size * bits // 8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack`: return codes, int64 [n_blocks, block_size]."""
    n = packed.shape[0]
    count = lanes(bits)
    n_bytes = count * bits // 8
    width = packed.shape[1] // n_bytes
    byte = torch.arange(n_bytes, device=packed.device).view(1, -1, 1) * 8
    word = (packed.to(torch.int64).view(n, n_bytes, width) << byte).sum(1)
    shift = torch.arange(count, device=packed.device).view(1, -1, 1) * bits
    return ((word.unsqueeze(1) >> shift) & (2**bits - 1)).reshape(n, count * width)


def blocks(x: Tensor, block_size: int) -> Tensor:
    """Return `x` flattened and padded with zeros to whole blocks: [n_blocks, block_size]."""
    flat = x.reshape(-1)
    pad = -flat.numel() % block_size
    return torch.nn.functional.pad(flat, (0, pad)).view(-1, block_size)

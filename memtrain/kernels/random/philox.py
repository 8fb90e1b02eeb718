"""Random bits from Philox4x32-10 counters: repeatable, independent of the launch shape."""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def signed(seed: int) -> int:
    """Return a seed of 64 bits, signed or not, as a signed integer."""
    if -(2**63) <= seed < 2**63:
        return seed
    if 0 < seed < 2**64:
        return seed - 2**64
    raise ValueError(f"seed={seed}; allowed: integers of 64 bits, from -2**63 to 2**64 - 1")


def philox(counter: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words per counter as int64: the stream of `tl.randint4x(seed, counter)`.

    Counters are int64 below 2**32; the other three counter words are 0. The seed has 64 bits,
    signed or not, which are the two key words.

    Example:
        >>> [hex(int(word)) for word in philox(torch.tensor(0), 0)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

    Reference:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    seed = signed(seed)
    c0 = counter & _MASK
    c1 = c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # The int64 product wraps, but its 64 bits are right.
        p0, p1 = _M0 * c0, _M1 * c2
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform_blocks(
    n_blocks: int, block_size: int, seed: int, device: torch.device, first: int = 0
) -> Tensor:
    """Return a uniform number `(r + 0.5) / 65536` per element of blocks, with `r` of 16 bits.

    A block is eight slices of `block_size / 8`. Position `c` of block `b`, numbered from `first`
    on, draws counter `b * block_size / 8 + c` once. Slice `s` takes word `s // 2`, the low half for
    even `s`, the high half for odd `s`. One Philox call serves eight elements, without shuffles.
    """
    width = block_size // 8
    counter = torch.arange(first * width, (first + n_blocks) * width, device=device)
    counter = counter.view(n_blocks, 1, width)
    halves = [half for word in philox(counter, seed) for half in (word & 0xFFFF, word >> 16)]
    return ((torch.cat(halves, dim=1).float() + 0.5) * 2.0**-16).view(n_blocks, block_size)


def uniform_pairs(n_blocks: int, block_size: int, seed: int, device: torch.device) -> Tensor:
    """Return `uniform_blocks` with half the draws: two blocks share their counters.

    Blocks `2k` and `2k + 1` draw the counters of block `k`, and the odd one rotates each word right
    by 8 bits. The high byte of a number is the low byte of another one in the other block: their
    correlation is 2**-8.
    """
    width, pairs = block_size // 8, (n_blocks + 1) // 2
    counter = torch.arange(pairs * width, device=device).view(pairs, 1, width)
    words = torch.cat(philox(counter, seed), dim=1)
    both = torch.stack([words, (words >> 8) | ((words & 0xFF) << 24)], dim=1)
    halves = torch.stack([both & 0xFFFF, both >> 16], dim=3).view(2 * pairs, block_size)
    return (halves[:n_blocks].float() + 0.5) * 2.0**-16

"""Random numbers and random choices from Philox counters: the same bits on every device."""

import math

import torch
from torch import Tensor

from memtrain.kernels.random import philox

_SHARE_BITS = 40  # resolution of a probability
# E[-ln u] over the 65,536 values that u takes: dividing by it makes the variance exactly 1.
_SPREAD = 0.9999947117163925


def normals(n: int, seed: int, device: torch.device) -> Tensor:
    """`n` independent normal numbers of mean 0 and variance 1 (Box and Muller's method).

    Args:
        n: How many, up to 2**34.
        seed: 64 bits.
        device: Where the result lies. The random bits are the same everywhere; logarithms and
            cosines may differ in the last place.

    Returns:
        float32, [n], magnitudes up to 4.86: two numbers share 16 + 16 random bits.

    Example:
        >>> normals(3, 1, torch.device("cpu")).shape
        torch.Size([3])
    """
    counters = (n + 7) // 8
    radius, angle = philox.uniform_blocks(1, 8 * counters, seed, device).view(2, -1)
    radius = radius.log_().mul_(-2 / _SPREAD).sqrt_()
    angle = angle * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]


def signs(n: int, seed: int, device: torch.device) -> Tensor:
    """`n` independent numbers 1 or -1, one random bit each.

    Args:
        n: How many, up to 2**39.
        seed: 64 bits.
        device: Where the result lies.

    Returns:
        float32, [n].

    Example:
        >>> signs(4, 1, torch.device("cpu")).abs()
        tensor([1., 1., 1., 1.])
    """
    counter = torch.arange((n + 127) // 128, device=device)
    words = torch.stack(philox.philox(counter, seed), dim=1).view(-1, 1)
    octets = ((words >> torch.arange(0, 32, 8, device=device)) & 0xFF).to(torch.uint8).view(-1, 1)
    bits = (octets >> torch.arange(8, device=device, dtype=torch.uint8)) & 1
    return bits.view(-1)[:n].float().mul_(2).sub_(1)


def integers(n: int, seed: int, device: torch.device) -> Tensor:
    """`n` independent integers of 62 random bits.

    Args:
        n: How many, up to 2**33.
        seed: 64 bits.
        device: Where the result lies.

    Returns:
        int64, [n], from 0 to 2**62 - 1.

    Example:
        >>> int(integers(1, 1, torch.device("cpu"))[0]) < 2**62
        True
    """
    w0, w1, w2, w3 = philox.philox(torch.arange((n + 1) // 2, device=device), seed)
    return torch.cat([(w0 << 30) | (w1 >> 2), (w2 << 30) | (w3 >> 2)])[:n]


def choose(n: int, count: int, seed: int, device: torch.device) -> Tensor:
    """`count` different ones of `n` things, every subset as likely as any other.

    Args:
        n: How many there are.
        count: How many to choose, at most `n`.
        seed: 64 bits.
        device: Where the result lies.

    Returns:
        int64, [count], ascending: the places of the smallest of `n` random integers.

    Example:
        >>> choose(3, 3, 1, torch.device("cpu"))
        tensor([0, 1, 2])
    """
    order = torch.argsort(integers(n, seed, device), stable=True)
    return order[:count].sort().values


def draw(weights: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` draws with replacement, in proportion to `weights`.

    Shares are integers over their sum (rounded up to 2**-40 of it, so that what has a weight can
    be drawn): sums of integers do not depend on their order, so that equal weights give equal draws
    on every run. Uniform where the weights sum to 0, NaN or Inf.

    Args:
        weights: float64, [n], not negative.
        count: How many draws.
        seed: 64 bits.

    Returns:
        index: int64, [count], ascending; what is drawn k times stands there k times.
        factor: float64, [count]: k / (count * share), so that the sum over *different* indices of
            factor times any values has the values' sum as its mean.

    Example:
        >>> draw(torch.tensor([0.0, 1.0], dtype=torch.float64), 2, seed=1)
        (tensor([1, 1]), tensor([1., 1.], dtype=torch.float64))
    """
    total = weights.sum()
    usable = total.isfinite() & (total > 0)
    share = torch.where(usable, weights / total, 1 / len(weights))
    parts = (share * 2.0**_SHARE_BITS).ceil().to(torch.int64)
    ends = parts.cumsum(0)
    draws = (integers(count, seed, weights.device) % ends[-1]).sort().values
    index = torch.searchsorted(ends, draws, right=True)
    times = torch.searchsorted(index, index, right=True) - torch.searchsorted(index, index)
    return index, times * (ends[-1].double() / (count * parts[index]))

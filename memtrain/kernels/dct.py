"""The orthonormal discrete cosine transform of any length, by a real FFT of the same length."""

import math

import torch
from torch import Tensor


def dct(x: Tensor) -> Tensor:
    """The orthonormal DCT-II of the last dimension: it keeps lengths and angles.

    A NaN or an Inf spoils its own row only.

    Args:
        x: [..., n], n at least 1, float32 or float64.

    Returns:
        The coefficients, shape and dtype of `x`.

    Memory:
        Works in about 3 times the bytes of `x`.

    Example:
        >>> dct(torch.ones(1, 4)).square()
        tensor([[4., 0., 0., 0.]])

    Reference:
        Makhoul, A fast cosine transform in one and two dimensions, IEEE TASSP 28, 1980.
    """
    n = x.shape[-1]
    reordered = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], dim=-1)
    turned = torch.fft.rfft(reordered) * _turns(n, x, -1.0)
    half = (n + 1) // 2  # the other coefficients are the imaginary parts, backwards
    values = torch.cat([turned.real, -turned.imag[..., 1:half].flip(-1)], dim=-1)
    return values * _norms(n, x)


def idct(x: Tensor) -> Tensor:
    """The inverse of `dct`, and its transpose.

    Args:
        x: [..., n], n at least 1, float32 or float64.

    Returns:
        Shape and dtype of `x`.

    Memory:
        Works in about 4 times the bytes of `x`.

    Example:
        >>> idct(torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
        tensor([[1., 1., 1., 1.]])
    """
    n = x.shape[-1]
    values = x / _norms(n, x)
    mirrored = torch.cat([torch.zeros_like(x[..., :1]), values[..., 1:].flip(-1)], dim=-1)
    middle = n // 2 + 1
    turned = torch.complex(values[..., :middle], -mirrored[..., :middle])
    reordered = torch.fft.irfft(turned * _turns(n, x, 1.0), n)
    half = (n + 1) // 2
    result = torch.empty_like(x)
    result[..., ::2] = reordered[..., :half]
    result[..., 1::2] = reordered[..., half:].flip(-1)
    return result


def _turns(n: int, like: Tensor, sign: float) -> Tensor:
    """exp(sign * i * pi * k / 2n) for the coefficients k that a real FFT has."""
    angle = torch.arange(n // 2 + 1, device=like.device, dtype=like.dtype) * (
        sign * math.pi / (2 * n)
    )
    return torch.complex(angle.cos(), angle.sin())


def _norms(n: int, like: Tensor) -> Tensor:
    norms = torch.full((n,), math.sqrt(2 / n), device=like.device, dtype=like.dtype)
    norms[0] = math.sqrt(1 / n)
    return norms

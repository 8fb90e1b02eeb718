"""How noisy a weight's gradient is: from the batch, and from a random projection of the input."""

from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.compressors.projection import Projection


class Variance(NamedTuple):
    """Two variances of a weight's gradient `grad.T @ x`, summed over its elements."""

    sgd: Tensor
    """Of drawing other tokens for the batch: what training lives with anyway."""
    projection: Tensor
    """Of drawing another projection for the same batch: what the compressor adds."""


class _Moments(NamedTuple):
    """Sums over tokens, float64: what every formula below is made of."""

    tokens: int
    x: Tensor  # |x_i|, [tokens]
    y: Tensor  # |y_i|, [tokens]
    product: Tensor  # |X^T Y|^2
    mirrored: Tensor  # sum of (x_i . x_j) (y_i . y_j) over j = tokens - 1 - i


def variance(x: Tensor, grad: Tensor, compressor: Projection | None = None) -> Variance:
    """The variance of a linear layer's weight gradient, and what a projection adds to it.

    The projection's is exact, for each kind, up to rounding: it is the mean over keys of
    `|grad.T @ (S^T S x) - grad.T @ x|^2`. It is 0 where the compressor keeps x. The batch's is the
    unbiased estimate from the tokens as independent samples, NaN for a single token.

    Args:
        x: The layer's input, [..., features], any float dtype.
        grad: The gradient of its output, [..., outputs], the same leading sizes.
        compressor: The projection; `Projection()` if not given.

    Returns:
        `sgd` and `projection`, 0-d, float64, on `x`'s device; in the gradient's units squared.

    Raises:
        ValueError: If the leading sizes differ, or there are no tokens.

    Memory:
        Works in 8 bytes per element of `x` and `grad`, and 8 features * outputs bytes.

    Example:
        >>> x, grad = torch.ones(50, 2), torch.ones(50, 3)
        >>> round(variance(x, grad, Projection(ratio=0.2, min_rows=1)).projection.item())
        3000

    Reference:
        Bershatsky et al., Memory-Efficient Backpropagation through Large Linear Layers, 2022,
        arXiv:2201.13195: `sgd` is its lemma. Its formula for projections,
        (|X|^2 |Y|^2 - |X^T Y|^2) / p, is that of drawing rows in proportion to |x_i|^2; normal
        numbers have + |X^T Y|^2 (their fourth moment), the others as below.
    """
    if x.shape[:-1] != grad.shape[:-1] or x.shape[:-1].numel() == 0:
        raise ValueError(
            f"x is {tuple(x.shape)} and grad {tuple(grad.shape)}; allowed: equal sizes but the "
            "last, none of them 0"
        )
    compressor = compressor or Projection()
    moments = _moments(x.detach(), grad.detach())
    n = moments.tokens
    squares = (moments.x * moments.y).square().sum()
    sgd = (n * squares - moments.product) / (n - 1) if n > 1 else squares * torch.nan
    p = compressor.rows(n)
    added = _FORMULAS[compressor.kind](moments, p) if p < n else torch.zeros_like(sgd)
    return Variance(sgd, added)


def _moments(x: Tensor, grad: Tensor) -> _Moments:
    x = x.reshape(-1, x.shape[-1]).double()
    y = grad.reshape(-1, grad.shape[-1]).double()
    mirrored = (x * x.flip(0)).sum(1) @ (y * y.flip(0)).sum(1)
    return _Moments(len(x), x.norm(dim=1), y.norm(dim=1), (x.t() @ y).square().sum(), mirrored)


def _rows(m: _Moments, p: int) -> Tensor:
    """Without replacement: the textbook variance of a sample from a finite population."""
    squares = (m.x * m.y).square().sum()
    return (m.tokens / p) * (m.tokens - p) / (m.tokens - 1) * (squares - m.product / m.tokens)


def _norm_rows(m: _Moments, p: int) -> Tensor:
    return (m.x.sum() * (m.x * m.y.square()).sum() - m.product) / p


def _gaussian(m: _Moments, p: int) -> Tensor:
    return (m.x.square().sum() * m.y.square().sum() + m.product) / p


def _rademacher(m: _Moments, p: int) -> Tensor:
    return _gaussian(m, p) - 2 * (m.x * m.y).square().sum() / p


def _dct(m: _Moments, p: int) -> Tensor:
    """That of `rows`, with the mean over signs of the transformed tokens' sum of squares.

    For coefficients c_ki of the transform, n^2 sum_k c_ki^2 c_kj^2 is n - 1, plus n / 2 where
    i = j and n / 2 where i + j = n - 1; the mean of a product of four signs is 1 where they
    cancel in pairs.
    """
    n, x2, y2 = m.tokens, m.x.square(), m.y.square()
    squares = x2 @ y2
    middle = (x2 * y2)[n // 2] if n % 2 else torch.zeros_like(squares)
    pairs = (n - 1) * x2.sum() * y2.sum() + n / 2 * (squares + x2 @ y2.flip(0))
    crossed = (n - 1) * (m.product - squares) + n / 2 * (m.mirrored - middle)
    transformed = (pairs + 2 * crossed) / n**2
    return (n / p) * (n - p) / (n - 1) * (transformed - m.product / n)


_FORMULAS = {
    "rows": _rows,
    "norm_rows": _norm_rows,
    "gaussian": _gaussian,
    "rademacher": _rademacher,
    "dct": _dct,
}

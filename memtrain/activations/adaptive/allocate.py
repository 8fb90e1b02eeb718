"""How many bits each tensor gets: least variance of the gradient under a budget of bits."""

from collections.abc import Sequence

import numpy as np

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
CAP = 1e10  # a sensitivity that is NaN, infinite or larger counts as this (GACT's bound)


def allocate(
    sensitivities: Sequence[float],
    sizes: Sequence[float],
    budget: float,
    *,
    allowed: Sequence[int] = WIDTHS,
) -> list[int]:
    """Choose widths b that make `sum C / (2**b - 1)**2` small, with `sum size * b <= budget`.

    Greedy: all items start at the most bits, and the cut that costs least per bit freed comes
    first, until the budget holds. The term of an item is convex in its bits, so every step on the
    way is the best allocation of its own size, and the last cut is all that can be lost: the
    result exceeds the best by less than what that cut cost. Where all sizes and all steps between
    the allowed widths are equal and the budget is a multiple of them, it is the best. More budget
    never takes a bit from an item.

    Args:
        sensitivities: C of each item: the variance that it brings into the gradient at 1 bit. NaN,
            infinities and anything above 1e10 count as 1e10.
        sizes: Elements of each item, more than 0.
        budget: Bits for all items together.
        allowed: The widths to choose from; 32 stands for a tensor that is kept.

    Returns:
        The width of each item.

    Raises:
        ValueError: If the lengths differ, a sensitivity is negative, a size is not positive, a
            width is below 1, or the budget is below what the smallest width takes.

    Example:
        >>> allocate([100.0, 1.0, 1.0], [10, 10, 10], 60)
        [4, 1, 1]

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129, section 4; Liu et al., GACT, ICML 2022,
        arXiv:2206.11357, section 4.
    """
    widths = sorted(set(allowed), reverse=True)
    costs, weights = _checked(sensitivities, sizes, widths)
    least = float(weights.sum()) * widths[-1]
    if not budget >= least * (1 - 1e-12):
        raise ValueError(f"budget={budget:g} bits; allowed: {least:g} or more")
    terms = 1.0 / (2.0 ** np.array(widths, dtype=np.float64) - 1) ** 2
    freed = -np.diff(np.array(widths, dtype=np.float64))  # bits per element of each cut
    # [cuts, items]: an item's cuts get dearer one after another, also after rounding
    each = np.outer(np.diff(terms) / freed, costs / weights)
    price = np.maximum.accumulate(each, axis=0)
    # Stable: of equal prices the earlier cut comes first.
    order = np.argsort(price, axis=None, kind="stable")
    spent = widths[0] * weights.sum() - np.cumsum(np.outer(freed, weights).reshape(-1)[order])
    n_cuts = 0
    if widths[0] * weights.sum() > budget:
        n_cuts = 1 + int(np.searchsorted(-spent, -budget * (1 + 1e-12)))
    cut = np.bincount(order[:n_cuts] % max(1, len(costs)), minlength=len(costs))
    return [widths[int(n)] for n in cut]


def objective(sensitivities: Sequence[float], bits: Sequence[int]) -> float:
    """The variance that `allocate` minimises: `sum C / (2**b - 1)**2`, with its cap on C.

    Args:
        sensitivities: C of each item.
        bits: The width of each item.

    Example:
        >>> objective([9.0, 1.0], [2, 1])
        2.0
    """
    costs = _capped(sensitivities)
    return float((costs / (2.0 ** np.array(bits, dtype=np.float64) - 1) ** 2).sum())


def _capped(sensitivities: Sequence[float]) -> np.ndarray:
    costs = np.array(sensitivities, dtype=np.float64)
    return np.where(np.isnan(costs), CAP, np.minimum(costs, CAP))


def _checked(
    sensitivities: Sequence[float], sizes: Sequence[float], widths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    if len(sensitivities) != len(sizes):
        raise ValueError(f"{len(sensitivities)} sensitivities, but {len(sizes)} sizes")
    if not widths or widths[-1] < 1:
        raise ValueError(f"allowed={tuple(widths)}; allowed: widths of 1 bit or more")
    costs, weights = _capped(sensitivities), np.array(sizes, dtype=np.float64)
    if (costs < 0).any():
        raise ValueError(f"sensitivity {costs.min():g}; allowed: 0 or more")
    if not (weights > 0).all():
        raise ValueError(f"size {weights.min():g}; allowed: more than 0")
    return costs, weights

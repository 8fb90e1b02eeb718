"""Bit widths of the sites with `bits: auto`: allocated under a budget, kept while training runs."""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor
from memtrain.compressors.auto import Auto

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
MOST = WIDTHS[-1]
CAP = 1e10  # a sensitivity that is NaN, infinite or larger counts as this (GACT's bound)
_PARTS = 16  # a fraction of a bit is a number of sixteenths of the samples


class BitWidths:
    """The present bit widths of every site with `bits: auto`: `average`, 1 to 8, over all.

    Until something has been measured, all have the average.
    """

    def __init__(self, average: float) -> None:
        if not 1 <= average <= 8:
            raise ValueError(f"average_bits={average}; allowed: 1 to 8")
        self.average = average
        self.widths: dict[str, tuple[int, ...]] = {}
        self.leaders: dict[str, str] = {}  # site -> the site whose payload it shares
        self.templates: dict[str, Auto] = {}  # of the sites that have been resolved
        self.stale: set[str] = set()  # sites whose plan shows earlier widths
        self.calls = 0  # of `GactAdapter.step`

    def resolve(self, site: Site, template: Auto) -> Compressor:
        """Give a site's compressor with its present bits; equal for sites that share a payload."""
        self.templates[site.name] = template
        leader = self.leaders.get(site.name, site.name)
        widths = self.widths.get(leader) or uniform(self.average)
        return template.with_bits(widths)

    def solve(self, samples: Mapping[str, Sequence[tuple[float, float]]]) -> None:
        """Allocate the budget among the sites at hand; others keep what they had.

        A site with samples of different widths gets the widths of its samples, most first; which
        sample gets which is decided again for every tensor.

        Each sample has a sensitivity and a number of elements. A site whose compressor takes one
        width has one sample.
        """
        owners = [site for site, rows in samples.items() for _ in rows]
        pairs = [pair for rows in samples.values() for pair in rows]
        sizes = [size for _, size in pairs]
        chosen = allocate(_normalised([c for c, _ in pairs]), sizes, self.average * sum(sizes))
        widths: dict[str, list[int]] = {}
        for owner, width in zip(owners, chosen, strict=True):
            widths.setdefault(owner, []).append(width)
        for site, bits in widths.items():
            new = tuple(sorted(bits, reverse=True))
            if new != self.widths.get(site):
                self.widths[site] = new
                self.stale |= {site, *(s for s, leader in self.leaders.items() if leader == site)}

    def state_dict(self) -> dict[str, Any]:
        """Give plain dicts and lists for `load_state_dict`."""
        widths = {site: list(bits) for site, bits in self.widths.items()}
        return {"widths": widths, "leaders": {**self.leaders}, "calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.widths = {str(k): tuple(map(int, v)) for k, v in state["widths"].items()}
        self.leaders, self.calls = dict(state["leaders"]), int(state["calls"])
        self.stale = set(self.templates)


def uniform(average: float) -> tuple[int, ...]:
    """Give widths for equal parts of the samples whose mean is `average`, rounded down to 1/16.

    Example:
        >>> uniform(2.0), uniform(2.5), uniform(1.25)
        ((2,), (3, 2), (2, 1, 1, 1))
    """
    low = int(average)
    more = int((average - low) * _PARTS)
    step = gcd(more, _PARTS)
    return (low + 1,) * (more // step) + (low,) * ((_PARTS - more) // step)


def allocate(sensitivities: Sequence[float], sizes: Sequence[float], budget: float) -> list[int]:
    """Choose widths b that make `sum C / (2**b - 1)**2` small, with `sum size * b <= budget`.

    Greedy: all items start at the most bits, and the cut that costs least per bit freed comes
    first, until the budget holds. The term of an item is convex in its bits, so every step on the
    way is the best allocation of its own size, and the last cut is all that can be lost: the
    result exceeds the best by less than what that cut cost. Where all sizes are equal and the
    budget is a multiple of them, it is the best. More budget never takes a bit from an item.

    A sensitivity C is the variance that an item adds to the gradient at 1 bit; NaN and values above
    1e10 count as 1e10. Sizes are numbers of elements, the budget is in bits.

    Example:
        >>> allocate([100.0, 1.0, 1.0], [10, 10, 10], 60)
        [4, 1, 1]

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129, section 4; Liu et al., GACT, ICML 2022,
        arXiv:2206.11357, section 4.
    """
    costs, weights = _checked(sensitivities, sizes)
    least = float(weights.sum())
    if not budget >= least * (1 - 1e-12):
        raise ValueError(f"budget={budget:g} bits; allowed: {least:g} or more")
    terms = 1.0 / (2.0 ** np.array(WIDTHS[::-1], dtype=np.float64) - 1) ** 2
    # [cuts, items]: an item's cuts get dearer one after another, also after rounding
    price = np.maximum.accumulate(np.outer(np.diff(terms), costs / weights), axis=0)
    # Stable: of equal prices the earlier cut comes first.
    order = np.argsort(price, axis=None, kind="stable")
    spent = MOST * weights.sum() - np.cumsum(np.tile(weights, MOST - 1)[order])
    n_cuts = 0
    if MOST * weights.sum() > budget:
        n_cuts = 1 + int(np.searchsorted(-spent, -budget * (1 + 1e-12)))
    cut = np.bincount(order[:n_cuts] % max(1, len(costs)), minlength=len(costs))
    return [MOST - int(n) for n in cut]


def _normalised(costs: Sequence[float]) -> list[float]:
    """Divide by the largest finite one: a loss scale must not reach the cap of `allocate`."""
    largest = max((c for c in costs if c < float("inf")), default=0.0)
    return [c / largest for c in costs] if largest > 0 else list(costs)


def _checked(
    sensitivities: Sequence[float], sizes: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    if len(sensitivities) != len(sizes):
        raise ValueError(f"{len(sensitivities)} sensitivities, but {len(sizes)} sizes")
    costs, weights = np.array(sensitivities, dtype=np.float64), np.array(sizes, dtype=np.float64)
    costs = np.where(np.isnan(costs), CAP, np.minimum(costs, CAP))
    if (costs < 0).any():
        raise ValueError(f"sensitivity {costs.min():g}; allowed: 0 or more")
    if not (weights > 0).all():
        raise ValueError(f"size {weights.min():g}; allowed: more than 0")
    return costs, weights

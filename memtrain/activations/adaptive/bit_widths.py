"""Which widths the sites with `bits: auto` have now, and how a budget is shared among them."""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

from memtrain.activations.adaptive.allocate import allocate
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor
from memtrain.compressors.auto import Auto

_PARTS = 16  # a fraction of a bit is told in sixteenths of the samples


class Need(NamedTuple):
    """What one site's tensors need: its samples' sensitivities, and the elements of each."""

    sensitivities: Sequence[float]
    sizes: Sequence[float]


class Bits:
    """The present widths of every site with `bits: auto`.

    Until something has been measured, all have the average.

    Args:
        average: Bits per element over all those sites, 1 to 8.

    Raises:
        ValueError: If `average` is out of range.

    Example:
        >>> from memtrain.compressors import Group
        >>> bits, site = Bits(4.0), Site("0", "linear", "input")
        >>> bits.resolve(site, Auto(template=Group())).bits
        4
    """

    def __init__(self, average: float) -> None:
        if not 1 <= average <= 8:
            raise ValueError(f"average_bits={average}; allowed: 1 to 8")
        self.average = average
        self.widths: dict[str, tuple[int, ...]] = {}
        self.leaders: dict[str, str] = {}  # site -> the site whose payload it shares
        self.weights: dict[str, tuple[float, ...]] = {}  # of the samples of the present batch
        self.autos: dict[str, Auto] = {}  # sites that have asked
        self.stale: set[str] = set()  # sites whose plan shows earlier widths
        self.calls = 0  # of whoever measures on a schedule

    def resolve(self, site: Site, auto: Auto) -> Compressor:
        """The compressor that a site has now; equal for sites that share a payload."""
        self.autos[site.name] = auto
        leader = self.leaders.get(site.name, site.name)
        widths = self.widths.get(leader) or uniform(self.average)
        return auto.with_bits(widths, self.weights.get(leader, ()))

    def solve(self, needs: Mapping[str, Need]) -> None:
        """Share the budget among the sites that are there; others keep what they had.

        A site with samples of different widths gets the widths of its samples, most first; which
        sample gets which is decided again for every tensor.

        Args:
            needs: Site -> what it needs. A site whose compressor takes one width has one sample.
        """
        owners = [name for name, need in needs.items() for _ in need.sizes]
        sizes = [size for need in needs.values() for size in need.sizes]
        costs = _scaled([c for need in needs.values() for c in need.sensitivities])
        chosen = allocate(costs, sizes, self.average * sum(sizes))
        widths: dict[str, list[int]] = {}
        for owner, width in zip(owners, chosen, strict=True):
            widths.setdefault(owner, []).append(width)
        for name, own in widths.items():
            new = tuple(sorted(own, reverse=True))
            if new != self.widths.get(name):
                self.widths[name] = new
                self.stale |= {name, *(s for s, leader in self.leaders.items() if leader == name)}

    def state(self) -> dict[str, Any]:
        """Plain dicts and lists that `load` takes."""
        widths = {site: list(own) for site, own in self.widths.items()}
        return {"widths": widths, "leaders": {**self.leaders}, "calls": self.calls}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self.widths = {str(k): tuple(map(int, v)) for k, v in state["widths"].items()}
        self.leaders, self.calls = dict(state["leaders"]), int(state["calls"])
        self.stale = set(self.autos)


def uniform(average: float) -> tuple[int, ...]:
    """Widths for equal parts of the samples whose mean is the average, rounded down to 1/16.

    Example:
        >>> uniform(2.0), uniform(2.5), uniform(1.25)
        ((2,), (3, 2), (2, 1, 1, 1))
    """
    low = int(average)
    more = int((average - low) * _PARTS)
    step = gcd(more, _PARTS)
    return (low + 1,) * (more // step) + (low,) * ((_PARTS - more) // step)


def _scaled(costs: Sequence[float]) -> list[float]:
    """Relative to the largest finite one: a loss scale must not reach the cap of `allocate`."""
    largest = max((c for c in costs if c < float("inf")), default=0.0)
    return [c / largest for c in costs] if largest > 0 else list(costs)

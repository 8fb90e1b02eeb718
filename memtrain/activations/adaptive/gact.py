"""GACT's automatic bits: sensitivities from backward passes with quantisation noise."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from memtrain.activations.adaptive.bit_widths import CAP, BitWidths
from memtrain.activations.adaptive.replay import (
    Closure,
    Gradient,
    gradient_replay,
    squared_distance,
)
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.saved.fit import Choose
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Keep


class GactAdapter:
    """Measures how sensitive the gradient is to each site's bits, once every `interval` steps.

    For each site with `bits: auto` whose tensors a forward saves: the gradient with this site at 1
    bit, again with other random bits, and at 8 bits, all else equal; its sensitivity is
    `max(|g0 - g1|**2, 2 max(|g0 - g2|**2, |g1 - g2|**2))`, twice the variance at 1 bit. Then the
    budget is allocated again. Sites are those of the forward at hand: others keep their bits.

    Reference:
        Liu et al., GACT, ICML 2022, arXiv:2206.11357, section 4.2.
    """

    def __init__(self, interception: Interception, bits: BitWidths, *, interval: int) -> None:
        self.interception, self.bits, self.interval = interception, bits, interval
        self.sensitivities: dict[str, float] = {}
        """Of the last measurement, by site: twice the gradient variance at 1 bit."""

    def step(self, closure: Closure) -> bool:
        """Measure in every `interval`-th call, from the first on; call it once per training step.

        Nothing of the model, its gradients or the random states is changed, also if the closure
        raises; only the bits are.

        The closure runs forward, loss and backward on one batch, without an optimizer step; it may
        zero the gradients. A measurement takes 3 passes per site and 1. Returns whether it
        measured.
        """
        due = self.bits.calls % self.interval == 0
        if due:
            self.measure(closure)
        self.bits.calls += 1
        return due

    def measure(self, closure: Closure) -> None:
        """Measure and allocate the budget now; see `step`."""
        watch, sizes = _sizes_of(self.bits)
        with gradient_replay(self.interception.model) as gradient:
            with self.interception.trial(self.interception.saved.choose, watch, {}):
                gradient(closure)
            sites = [site for site in sizes if site not in self.bits.leaders]
            found = {site: self._sensitivity(site, gradient, closure) for site in sites}
        self.sensitivities = found
        self.bits.solve({site: [(found[site], sizes[site])] for site in sites})
        self.interception.record_next()

    def _sensitivity(
        self, site: str, gradient: Callable[[Closure], Gradient], closure: Closure
    ) -> float:
        gradients = []
        for width, draw in ((1, 0), (1, 1), (8, 2)):
            with self.interception.trial(self._choose(site, width), None, {site: draw}):
                gradients.append(gradient(closure))
        g0, g1, g2 = gradients
        found = max(
            squared_distance(g0, g1), 2 * squared_distance(g0, g2), 2 * squared_distance(g1, g2)
        )
        return min(found, CAP) if found == found else CAP  # NaN is not equal to itself

    def _choose(self, site: str, width: int) -> Choose:
        """Give one site, and those that share its payload, another width; others as always."""
        usual = self.interception.saved.choose

        def choose(at: Site) -> Compressor | Keep:
            chosen = usual(at)
            if site in (at.name, self.bits.leaders.get(at.name)):
                return self.bits.templates[at.name].with_bits((width,))
            return chosen

        return choose


def _sizes_of(bits: BitWidths) -> tuple[Any, dict[str, float]]:
    """Return a watch that finds which sites share a payload, and the elements that it counts."""
    sizes: dict[str, float] = {}
    owners: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def saved(site: Site, x: Tensor, node: Any, payload: Any = None) -> None:
        if site.name not in bits.templates:
            return
        owner = site.name if payload is None else owners.setdefault(payload, site.name)
        if owner == site.name:
            sizes[owner] = sizes.get(owner, 0.0) + x.numel()
        else:
            bits.leaders[site.name] = owner

    return SimpleNamespace(begin=lambda step: False, saved=saved), sizes

"""ActNN's sensitivities: from what a forward saves and the gradients that its backward computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from memtrain.activations.adaptive.bit_widths import BitWidths
from memtrain.activations.saved.site import Site
from memtrain.compressors.samples import sensitivity


@dataclass
class _SavedTensor:
    """Ranges of one saved tensor, and output gradients of the ops that read it in backward."""

    site: str
    ranges: Tensor  # R of each sample, [samples]
    size: float  # elements of a sample
    terms: list[Tensor] = field(default_factory=list)  # (K / 4g) (G / P) S of each backward

    def observe(self, factor: float, grads: Sequence[Tensor | None]) -> None:
        """Add the gradient of an op's first result, which a backward has computed."""
        if grads and grads[0] is not None:
            self.terms.append(factor * grads[0].detach().float().square().sum())

    def costs(self) -> list[float]:
        """Give C of each sample, summed over the ops; none if no gradient came."""
        terms, mean = self.terms, self.ranges / max(1, len(self.ranges))
        return (mean * sum(terms[1:], terms[0])).tolist() if terms else []


class ActnnSensitivity:
    """Measures sensitivities in every `interval`-th step, and allocates the bits again after it.

    The sensitivity of sample n of a saved tensor is `C_n = K / (4 g) * G / P * R_n * S`, with K the
    size of the convolution's kernel (1 for other ops), g its groups, G the elements of a
    quantisation group, P the positions that share a weight (pixels, tokens), R_n the sum over the
    sample's groups of (max - min)**2, and S the mean over samples of the squared norm of the
    gradient of the op's output. A tensor that several ops read has the sum over them. For a linear
    layer or a convolution, C_n / (2**b - 1)**2 bounds the variance that rounding to b bits adds to
    the weight's gradient; for other ops it is a heuristic.

    Memory:
        In a measured step, 4 bytes per sample and saved tensor.

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129, section 4.
    """

    def __init__(self, bits: BitWidths, interval: int) -> None:
        self.bits, self.interval = bits, interval
        self.reset()

    def __getstate__(self) -> dict[str, object]:
        return {"bits": self.bits, "interval": self.interval}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def reset(self) -> None:
        """Forget an unfinished measurement."""
        self._measuring = False
        self._saved: list[_SavedTensor] = []
        self._by_payload: WeakKeyDictionary[Any, _SavedTensor] = WeakKeyDictionary()

    def begin(self, step: int) -> bool:
        """Begin a forward; return whether bits were allocated from the last step."""
        solved, due = self.flush(), step % self.interval == 0
        if due:
            self.reset()
        self._measuring = due  # else a backward that is still to come is waited for
        return solved

    def flush(self) -> bool:
        """Allocate the bits from what has been measured, if a backward has been seen."""
        if not any(saved.terms for saved in self._saved):
            return False
        self.bits.solve(self._sensitivities())
        self.reset()
        return True

    def saved(self, site: Site, x: Tensor, node: Any, payload: Any = None) -> None:
        """Note that an op saves `x`, as a payload that other saves may share."""
        template = self.bits.templates.get(site.name)
        if not self._measuring or template is None or isinstance(x, FakeTensor):
            return
        known = None if payload is None else self._by_payload.get(payload)
        if known is None:
            with torch.no_grad():
                ranges = sensitivity(x, template.group_size)
            known = _SavedTensor(site.name, ranges, x.numel() / max(1, len(ranges)))
            self._saved.append(known)
            if payload is not None:
                self._by_payload[payload] = known
        elif known.site != site.name:
            self.bits.leaders[site.name] = known.site
        factor = _factor(site.op, x, node, template.group_size)
        node.register_prehook(partial(known.observe, factor))

    def _sensitivities(self) -> dict[str, Sequence[tuple[float, float]]]:
        """Give sensitivity and size of each sample by site."""
        found: dict[str, list[tuple[float, float]]] = {}
        for saved in self._saved:
            costs = saved.costs()
            if costs and self.bits.templates[saved.site].per_sample:
                found.setdefault(saved.site, []).extend((c, saved.size) for c in costs)
            elif costs:  # one width for all calls
                before = found.get(saved.site, [(0.0, 0.0)])[0]
                found[saved.site] = [(before[0] + sum(costs), before[1] + saved.size * len(costs))]
        return dict(found)


def _factor(op: str, x: Tensor, node: Any, group_size: int) -> float:
    """Give K / (4 g) * G / P."""
    kernel, groups, positions = 1, 1, 1
    weight = getattr(node, "_saved_weight", None) if op.startswith("conv") else None
    if weight is not None and weight.dim() == x.dim() > 2:
        kernel, groups = weight.shape[2:].numel(), node._saved_groups
        positions = x.shape[2:].numel()
    elif x.dim() > 1:
        positions = x.numel() // max(1, x.shape[0] * x.shape[-1])
    return kernel / (4 * max(1, groups)) * group_size / max(1, positions)

"""What a run in mixed precision has come to: which tensors are low now, and what was promoted."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from memtrain.compressors import Key
from memtrain.kernels.floats.formats import FloatFormat
from memtrain.precision.assign import Assignment, assign
from memtrain.precision.graph import Graph
from memtrain.precision.options import Precision
from memtrain.precision.scale import LossScale


class Promotion(NamedTuple):
    """One activation or weight that became high for good."""

    step: int
    """Gradient computations before it."""
    site: str
    ratio: float
    """Share of its elements that overflowed."""


class PrecisionState:
    """Formats of all tensors of training, as they are now.

    Args:
        asked: A config's `precision`.

    Example:
        >>> from memtrain.precision.graph import Value
        >>> state = PrecisionState(Precision(assignment="uniform"))
        >>> state.settle(Graph((Value("a", 8, 0), Value("w", 8, 0, weight=True)), ("l / linear",)))
        >>> state.ratio, state.bits  # the weight's gradient stays at 16 bits
        (0.75, 320)
        >>> state.promote({"a": 0.5, "w": 0.001})
        >>> state.ratio, [promotion.site for promotion in state.promotions]
        (0.5, ['a'])
    """

    def __init__(self, asked: Precision) -> None:
        self.asked = asked
        self.graph: Graph | None = None
        self.assignment = Assignment()
        """Before any promotion."""
        self.promotions: list[Promotion] = []
        """In the order in which they came."""
        self.scale = LossScale(asked.loss_scale, asked.initial_scale, asked.growth_interval)
        self.step = 0
        """Gradient computations so far."""
        self.unseen: dict[str, None] = {}
        """Tensors that the traced forward did not have: they are high."""
        self.gemms: dict[str, str] = {}
        """Linear layers -> why they do not run on FP8 GEMMs, empty where they do."""
        self.halved = 0
        """Operands of FP8 GEMMs that held the format's largest numbers, and lost a bit below."""
        self._ratios = 0.0  # summed over the gradient computations
        self._tables()

    def _tables(self) -> None:
        """Formats by name; by whether it is low, since formats are few."""
        promoted = {promotion.site for promotion in self.promotions}
        self._low = self.assignment.forward - promoted
        self._known = {value.name for value in self.graph.values} if self.graph else set()
        self._forward = {True: self.asked.low_format, False: self.asked.high_format}
        self._backward = {low: self.asked.backward_format(low=low) for low in (True, False)}

    def settle(self, graph: Graph) -> None:
        """Choose the assignment for a graph."""
        self.graph, self.assignment = graph, assign(graph, self.asked)
        self._tables()

    def knows(self, name: str) -> bool:
        """Whether the traced forward had it."""
        return name in self._known

    def is_low(self, name: str) -> bool:
        """Whether an activation or a weight is low now."""
        return name in self._low

    def forward_format(self, name: str) -> FloatFormat | None:
        """What an activation or a weight is rounded to; None: nothing."""
        return self._forward[name in self._low]

    def backward_format(self, name: str) -> FloatFormat | None:
        """What its gradient is rounded to; None: nothing."""
        return self._backward[name in self.assignment.backward]

    def low_gradient(self, name: str) -> FloatFormat | None:
        """What an activation's gradient is rounded to, if it is low."""
        return self._backward[True] if name in self.assignment.backward else None

    def seed(self, name: str, form: FloatFormat | None, *, weight: bool = False) -> int:
        """What feeds stochastic rounding to `form`: another one in each gradient computation.

        Forwards of one computation draw alike, so that a recomputation rounds as the first time;
        ranks differ, but for weights, which are replicated.
        """
        if form is None or form.rounding != "stochastic":
            return 0
        rank = 0 if weight else _rank()
        return Key(self.asked.seed, zlib.crc32(name.encode()), self.step, rank=rank).bits()

    @property
    def gradient_format(self) -> FloatFormat | None:
        """What gradients of weights are rounded to: never low."""
        return self._backward[False]

    def promote(self, overflowed: Mapping[str, float]) -> None:
        """A gradient computation has ended, in which these shares of tensors' elements overflowed.

        Args:
            overflowed: Site -> overflow ratio, 0 to 1.
        """
        self._ratios += self.ratio
        threshold = self.asked.promotion
        if threshold is not None:
            for site, ratio in overflowed.items():
                if ratio >= threshold and site in self._low:
                    self.promotions.append(Promotion(self.step, site, ratio))
            self._tables()
        self.step += 1

    @property
    def ratio(self) -> float:
        """The low-precision ratio: what really is low now, of all elements."""
        if self.graph is None:
            return 0.0
        low = Assignment(self._low, self.assignment.backward)
        return low.elements(self.graph) / self.graph.elements

    @property
    def demoted_ratio(self) -> float:
        """The same with the gradients of low weights counted and nothing promoted.

        It is what the ordered assignments compare with the ratio that was asked for.
        """
        if self.graph is None:
            return 0.0
        weights = sum(
            value.numel
            for value in self.graph.values
            if value.weight and value.gradient and value.name in self.assignment.forward
        )
        return (self.assignment.elements(self.graph) + weights) / self.graph.elements

    @property
    def average_ratio(self) -> float:
        """The low-precision ratio, averaged over the gradient computations so far."""
        return self._ratios / self.step if self.step else self.ratio

    @property
    def bits(self) -> int:
        """The model aggregate: bits of all tensors of training."""
        if self.graph is None:
            return 0
        return sum(
            value.numel * _bits(self.forward_format(value.name))
            + value.numel * value.gradient * _bits(self.backward_format(value.name))
            for value in self.graph.values
        )

    def state(self) -> dict[str, Any]:
        """Plain dicts and lists that `load` takes."""
        return {
            "step": self.step,
            "ratios": self._ratios,
            "promotions": [list(promotion) for promotion in self.promotions],
            "scale": self.scale.state(),
            "forward": sorted(self.assignment.forward),
            "backward": sorted(self.assignment.backward),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self.step, self._ratios = int(state["step"]), float(state["ratios"])
        self.promotions = [
            Promotion(int(step), str(site), float(ratio))
            for step, site, ratio in state["promotions"]
        ]
        self.scale.load(state["scale"])
        self.assignment = Assignment(frozenset(state["forward"]), frozenset(state["backward"]))
        self._tables()

    def __str__(self) -> str:
        asked = self.asked
        if self.graph is None:
            return f"{asked.assignment}: known from the first training forward on"
        of = f"({asked.ratio})" if asked.assignment in _WITH_RATIO else ""
        lines = [
            f"{asked.assignment}{of}: low {asked.low} and {asked.low_backward}, high {asked.high}",
            f"low-precision ratio {self.ratio:.4f} ({self.demoted_ratio:.4f} in demoted groups)",
            f"model aggregate {self.bits:,} bits, {_all_high(self.graph, self._forward[False]):,} "
            "if all were high",
            f"{len(self.promotions)} promoted in {self.step} gradient computations",
            *(
                f"    step {promotion.step}: {promotion.site}, {promotion.ratio:.2%} overflowed"
                for promotion in self.promotions
            ),
        ]
        if self.scale.active:
            lines.append(f"loss scale {self.scale.value:g}, {self.scale.overflows} overflows")
        elif self.scale.off:
            lines.append(f"loss scale: {self.scale.off}")
        if asked.fp8_gemm:
            plain = [f"{site}: {why}" for site, why in self.gemms.items() if why]
            lines.append(
                f"FP8 GEMMs: {len(self.gemms) - len(plain)} of {len(self.gemms)} linear layers, "
                f"{self.halved} operands halved"
            )
            lines += [f"    not {one}" for one in plain]
        return "\n".join([*lines, *_several("not in the traced forward, so high", self.unseen)])


_WITH_RATIO = ("size_ordered", "increasing", "random")


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _bits(form: FloatFormat | None) -> int:
    return 32 if form is None else form.bits


def _all_high(graph: Graph, high: FloatFormat | None) -> int:
    return graph.elements * _bits(high)


def _several(title: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"{title}: {', '.join(names[:5])} ({len(names)})"] if names else []

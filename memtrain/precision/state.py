"""The state of training in mixed precision: low tensors, promotions and the loss scale."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from memtrain.compressors import Key
from memtrain.kernels.floats.formats import FloatFormat
from memtrain.precision.assignment import SIZE_ORDERED, Names, Precision, assign
from memtrain.precision.graph import Graph

GROWTH, BACKOFF = 2.0, 0.5
MAX_SCALE, MIN_SCALE = 2.0**32, 2.0**-32


class LossScale:
    """The factor of gradients inside the model, a power of two, as in torch's GradScaler.

    The scale is halved after a backward pass with an overflow, and doubled after `interval`
    consecutive passes without one. The mode is `dynamic`, `static` or `none` (always 1).
    """

    def __init__(self, mode: str, initial: float, interval: int) -> None:
        self.mode, self.interval = mode, interval
        self.value = 1.0 if mode == "none" else initial
        self.clean = 0
        """Passes without an overflow since the last change."""
        self.overflows = 0
        """Passes that overflowed so far."""
        self.off = ""
        """Why the scale is not used although the config requests it."""

    @property
    def active(self) -> bool:
        """Whether gradients are scaled."""
        return self.mode != "none" and not self.off

    def disable(self, why: str) -> None:
        """Stop scaling permanently."""
        self.off, self.value = why, 1.0

    def update(self, *, overflow: bool) -> None:
        """Halve or double the scale after a backward pass."""
        self.overflows += overflow
        if self.mode != "dynamic" or self.off:
            return
        if overflow:
            self.value, self.clean = max(self.value * BACKOFF, MIN_SCALE), 0
            return
        self.clean += 1
        if self.clean >= self.interval:
            self.value, self.clean = min(self.value * GROWTH, MAX_SCALE), 0

    def state_dict(self) -> dict[str, Any]:
        """Return a plain dict for `load_state_dict`."""
        return {name: getattr(self, name) for name in ("value", "clean", "overflows", "off")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.value, self.clean = float(state["value"]), int(state["clean"])
        self.overflows, self.off = int(state["overflows"]), str(state["off"])


class PrecisionState:
    """Current formats of all tensors of training, for a config's `precision`.

    Example:
        >>> from memtrain.precision.graph import GraphTensor
        >>> state = PrecisionState(Precision(assignment="uniform"))
        >>> tensors = GraphTensor("a", 8, 0), GraphTensor("w", 8, 0, weight=True)
        >>> state.assign(Graph(tensors, ("l / linear",)))
        >>> state.ratio, state.bits  # the weight's gradient stays at 16 bits
        (0.75, 320)
        >>> state.promote({"a": 0.5, "w": 0.001})
        >>> state.ratio, state.promotions
        (0.5, {'a': (0, 0.5)})
    """

    def __init__(self, config: Precision) -> None:
        self.config = config
        self.graph: Graph | None = None
        self.forward, self.backward = Names(), Names()
        """The result of `assign`, before any promotion."""
        self.promotions: dict[str, tuple[int, float]] = {}
        """Activation or weight that is high permanently -> the number of gradient computations
        before its promotion, and the share of its elements that overflowed."""
        self.scale = LossScale(config.loss_scale, config.initial_scale, config.growth_interval)
        self.step = 0
        """Number of gradient computations so far."""
        self.untraced: dict[str, None] = {}
        """Tensors that the traced forward did not have, which are high."""
        self._index()

    def _index(self) -> None:
        """Index known and low names, and formats by low and high."""
        self._low = self.forward - self.promotions.keys()
        self._known = {tensor.name for tensor in self.graph.tensors} if self.graph else set()
        self._forward = {True: self.config.low_format, False: self.config.high_format}
        self._backward = {low: self.config.backward_format(low=low) for low in (True, False)}

    def assign(self, graph: Graph) -> None:
        """Assign formats to the tensors of a graph."""
        self.graph, (self.forward, self.backward) = graph, assign(graph, self.config)
        self._index()

    def is_traced(self, name: str) -> bool:
        """Return whether the traced forward had the tensor."""
        return name in self._known

    def is_low(self, name: str) -> bool:
        """Return whether an activation or a weight is low."""
        return name in self._low

    def forward_format(self, name: str) -> FloatFormat | None:
        """Return the format of an activation or a weight; None if it is not rounded."""
        return self._forward[name in self._low]

    def backward_format(self, name: str) -> FloatFormat | None:
        """Return the format of its gradient; None if it is not rounded."""
        return self._backward[name in self.backward]

    def seed(self, name: str, float_format: FloatFormat | None, *, weight: bool = False) -> int:
        """Return the seed of stochastic rounding, a new one per gradient computation.

        A recomputation uses the seed of its forward. Ranks differ, except for replicated weights.
        """
        if float_format is None or float_format.rounding != "stochastic":
            return 0
        rank = 0 if weight else _rank()
        return Key(self.config.seed, zlib.crc32(name.encode()), self.step, rank=rank).bits()

    @property
    def gradient_format(self) -> FloatFormat | None:
        """The format of the gradients of weights, which is never low."""
        return self._backward[False]

    def promote(self, overflowed: Mapping[str, float]) -> None:
        """End a gradient computation; promote low tensors whose overflow ratio is too high."""
        threshold = self.config.promotion
        if threshold is not None:
            for site, ratio in overflowed.items():
                if ratio >= threshold and site in self._low:
                    self.promotions[site] = self.step, ratio
            self._index()
        self.step += 1

    @property
    def ratio(self) -> float:
        """The low-precision ratio: the share of all elements that is low now."""
        return self._share(self._low, Names())

    @property
    def demoted_ratio(self) -> float:
        """The ratio with gradients of low weights counted and promotions ignored.

        `size_ordered` compares this value with the requested ratio.
        """
        tensors = self.graph.tensors if self.graph else ()
        weights = Names(x.name for x in tensors if x.weight and x.gradient)
        return self._share(self.forward, weights & self.forward)

    def _share(self, low: Names, weights: Names) -> float:
        """Return the share of low elements, with the gradients of some weights."""
        if self.graph is None:
            return 0.0
        gradients = self.backward | weights
        found = sum(x.numel * ((x.name in low) + (x.name in gradients)) for x in self.graph.tensors)
        return found / self.graph.elements

    @property
    def bits(self) -> int:
        """The model aggregate: bits of all tensors of training."""
        if self.graph is None:
            return 0
        return sum(
            x.numel * _bits(self.forward_format(x.name))
            + x.numel * x.gradient * _bits(self.backward_format(x.name))
            for x in self.graph.tensors
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists for `load_state_dict`."""
        return {
            "step": self.step,
            "promotions": [[step, site, ratio] for site, (step, ratio) in self.promotions.items()],
            "scale": self.scale.state_dict(),
            "forward": sorted(self.forward),
            "backward": sorted(self.backward),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step = int(state["step"])
        self.promotions = {
            str(site): (int(step), float(ratio)) for step, site, ratio in state["promotions"]
        }
        self.scale.load_state_dict(state["scale"])
        self.forward, self.backward = Names(state["forward"]), Names(state["backward"])
        self._index()

    def __str__(self) -> str:
        config = self.config
        if self.graph is None:
            return f"{config.assignment}: known from the first training forward on"
        all_high = self.graph.elements * _bits(self._forward[False])
        of = f"({config.ratio})" if config.assignment == SIZE_ORDERED else ""
        lines = [
            f"{config.assignment}{of}: low {config.low} and {config.low_backward}, "
            f"high {config.high}",
            f"low-precision ratio {self.ratio:.4f} ({self.demoted_ratio:.4f} in demoted groups)",
            f"model aggregate {self.bits:,} bits, {all_high:,} if all were high",
            f"{len(self.promotions)} promoted in {self.step} gradient computations",
            *(
                f"    step {step}: {site}, {ratio:.2%} overflowed"
                for site, (step, ratio) in self.promotions.items()
            ),
        ]
        if self.scale.active:
            lines.append(f"loss scale {self.scale.value:g}, {self.scale.overflows} overflows")
        elif self.scale.off:
            lines.append(f"loss scale: {self.scale.off}")
        if self.untraced:
            some = ", ".join([*self.untraced][:5])
            lines.append(f"not in the traced forward, so high: {some} ({len(self.untraced)})")
        return "\n".join(lines)


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _bits(float_format: FloatFormat | None) -> int:
    return 32 if float_format is None else float_format.bits

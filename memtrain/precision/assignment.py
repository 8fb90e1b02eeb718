"""Assignment of float formats to the tensors of training, from a config."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memtrain.kernels.floats.formats import FloatFormat, named_format
from memtrain.precision.graph import Graph, GraphTensor

FP32 = "fp32"
SIZE_ORDERED = "size_ordered"
ASSIGNMENTS = (FP32, "uniform", "operator", "operator_out", SIZE_ORDERED)
LOSS_SCALES = ("dynamic", "static", "none")


@dataclass(kw_only=True)
class Precision:
    """A config's `precision`: the float formats of the tensors of training.

    Example:
        >>> Precision(assignment="size_ordered", ratio=0.5).active
        True
    """

    assignment: str = FP32
    """`fp32`: nothing is rounded. `uniform`: all tensors are low. `size_ordered`: groups of tensors
    between two GEMMs become low, largest first, until `ratio` of all elements is low. `operator`:
    inputs of GEMMs and gradients of their outputs are low. `operator_out`: their outputs, too."""
    ratio: float = 1.0
    """Share of the elements of all tensors of training, 0 to 1, for `size_ordered`."""
    seed: int = 0
    """The seed of stochastic rounding."""
    keep_first: bool = False
    """Whether the first GEMM's input, weights and output gradient stay high."""
    keep_last: bool = False
    """Whether the last GEMM's output and all later tensors stay high."""
    low: str = "fp8_forward"
    """Format of low activations and weights: a name in `memtrain.precision.FORMATS`, or
    `1-E-M+bias`. A suffix `:even` or `:stochastic` changes the rounding."""
    low_backward: str = "fp8_backward"
    """Format of low gradients of activations."""
    high: str = "fp16"
    """Format of other tensors and of the gradients of weights. `fp16` is the paper's 1-6-9, not
    IEEE's. `fp32` does not round."""
    promotion: float | None = 0.01
    """Overflow ratio at which a low activation or weight becomes high permanently; empty: never."""
    loss_scale: str = "dynamic"
    """`dynamic`, `static` (always `initial_scale`) or `none`. A user's GradScaler turns the loss
    scale off."""
    initial_scale: float = 65536.0
    """The first loss scale, a power of two."""
    growth_interval: int = 2000
    """Backward passes without an overflow before the scale is doubled."""

    def __post_init__(self) -> None:
        _check_choice("assignment", self.assignment, ASSIGNMENTS)
        _check_choice("loss_scale", self.loss_scale, LOSS_SCALES)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"precision.ratio={self.ratio}; allowed: 0 to 1")
        if self.promotion is not None and not 0 < self.promotion <= 1:
            raise ValueError(
                f"precision.promotion={self.promotion}; allowed: above 0, up to 1; null"
            )
        scale = self.initial_scale
        if not 1 <= scale <= 2.0**32 or scale.hex().split("p")[0] != "0x1.0000000000000":
            raise ValueError(
                f"precision.initial_scale={scale}; allowed: powers of two from 1 to 2**32"
            )
        if self.growth_interval < 1:
            raise ValueError(f"precision.growth_interval={self.growth_interval}; allowed: from 1")
        if self.high_format is not None and self.high_format.bits < self.low_format.bits:
            raise ValueError(
                f"precision.high={self.high!r} has fewer bits than low={self.low!r}; "
                "allowed: at least as many"
            )
        _format_of("low_backward", self.low_backward)

    @property
    def active(self) -> bool:
        """Whether anything is rounded."""
        return self.assignment != FP32

    @property
    def low_format(self) -> FloatFormat:
        """The format of low activations and weights."""
        return _format_of("low", self.low)

    @property
    def high_format(self) -> FloatFormat | None:
        """The format of other tensors; None if they are not rounded."""
        return None if self.high == FP32 else _format_of("high", self.high)

    def backward_format(self, *, low: bool) -> FloatFormat | None:
        """Return the format of gradients, whose overflows are Inf for the loss scale."""
        float_format = _format_of("low_backward", self.low_backward) if low else self.high_format
        return float_format and replace(float_format, overflow="inf")


Names = frozenset[str]


def assign(graph: Graph, config: Precision) -> tuple[Names, Names]:
    """Choose the low activations and weights, and the activations with low gradients.

    Gradients of weights are never low. Promotions follow later.

    Example:
        >>> from memtrain.precision.graph import GraphTensor
        >>> tensors = GraphTensor("a", 8, 0), GraphTensor("b", 4, 1)
        >>> graph = Graph(tensors, ("l / linear",))
        >>> assign(graph, Precision(assignment="size_ordered", ratio=0.5))
        (frozenset({'a'}), frozenset({'a'}))

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464,
        sections 3.1 and 4.1; Sun et al., HFP8 Training, NeurIPS 2019 (`operator`).
    """
    high = {0} if config.keep_first else set()  # the group that feeds the first GEMM
    if config.keep_last:
        high.add(len(graph.gemms))
    tensors = [tensor for tensor in graph.tensors if tensor.group not in high]
    if config.assignment == "uniform":
        return _all_low(tensors)
    if config.assignment in ("operator", "operator_out"):
        return _operator_assignment(tensors, config)
    if config.assignment != SIZE_ORDERED:
        return Names(), Names()
    sizes, chosen = group_elements(graph), set[int]()
    # The earlier of equal groups comes first.
    for group in sorted(sorted(sizes.keys() - high), key=sizes.__getitem__, reverse=True):
        if sum(sizes[one] for one in chosen) >= config.ratio * graph.elements:
            break
        chosen.add(group)
    return _all_low([tensor for tensor in tensors if tensor.group in chosen])


def group_elements(graph: Graph) -> dict[int, int]:
    """Return the number of elements of each group, including gradients of weights."""
    return {group: sum(x.elements for x in tensors) for group, tensors in graph.groups().items()}


def _all_low(tensors: Sequence[GraphTensor]) -> tuple[Names, Names]:
    gradients = Names(x.name for x in tensors if x.gradient and not x.weight)
    return Names(x.name for x in tensors), gradients


def _operator_assignment(tensors: Sequence[GraphTensor], config: Precision) -> tuple[Names, Names]:
    outputs = config.assignment == "operator_out"
    first = 1 if config.keep_first else None  # the group of the first GEMM's output
    gradients = [x for x in tensors if x.gemm_output and x.gradient and not x.weight]
    forward = Names(x.name for x in tensors if x.gemm_input or (outputs and x.gemm_output))
    return forward, Names(x.name for x in gradients if x.group != first)


def _format_of(field: str, name: str) -> FloatFormat:
    try:
        return named_format(name)
    except ValueError as error:
        raise ValueError(f"precision.{field}={name!r}: {error}") from error


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"precision.{field}={value!r}; allowed: {', '.join(allowed)}")

"""Which tensors of training are rounded to which float format: a config's, as an assignment."""

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
    """A config's `precision`: which tensors of training are rounded to which float format.

    Example:
        >>> Precision(assignment="size_ordered", ratio=0.5).active
        True
    """

    assignment: str = FP32
    """`fp32` rounds nothing. `size_ordered`: groups of tensors between two GEMMs, largest first,
    become low until `ratio` of all elements is.
    `uniform`: everything low. `operator`: the inputs of GEMMs and the gradients of their outputs;
    `operator_out`: also their outputs."""
    ratio: float = 1.0
    """Of the elements of all tensors of training, 0 to 1; for `size_ordered`."""
    seed: int = 0
    """Of stochastic rounding."""
    keep_first: bool = False
    """The first GEMM's input, weights and output gradient stay high."""
    keep_last: bool = False
    """The last GEMM's output and all that comes after it stay high."""
    low: str = "fp8_forward"
    """Low activations and weights: a name of `memtrain.precision.FORMATS`, or `1-E-M+bias`; with
    `:even` or `:stochastic` after it for another rounding."""
    low_backward: str = "fp8_backward"
    """Low gradients of activations."""
    high: str = "fp16"
    """All that is not low, and the gradients of weights. `fp16` is the paper's 1-6-9, not IEEE's;
    `fp32` leaves it as it is."""
    promotion: float | None = 0.01
    """A low activation or weight of which this share overflows becomes high for good; empty:
    never."""
    loss_scale: str = "dynamic"
    """`dynamic`, `static` (always `initial_scale`) or `none`. A GradScaler of the user's own turns
    it off."""
    initial_scale: float = 65536.0
    """A power of two."""
    growth_interval: int = 2000
    """Backward passes without an overflow after which the scale is doubled."""

    def __post_init__(self) -> None:
        _one_of("assignment", self.assignment, ASSIGNMENTS)
        _one_of("loss_scale", self.loss_scale, LOSS_SCALES)
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
        _named("low_backward", self.low_backward)

    @property
    def active(self) -> bool:
        """Whether anything is rounded."""
        return self.assignment != FP32

    @property
    def low_format(self) -> FloatFormat:
        """The format of low activations and weights."""
        return _named("low", self.low)

    @property
    def high_format(self) -> FloatFormat | None:
        """The format of what is not low; None: left as it is."""
        return None if self.high == FP32 else _named("high", self.high)

    def backward_format(self, *, low: bool) -> FloatFormat | None:
        """Give the format of gradients, which overflow to Inf: the loss scale must see that."""
        form = _named("low_backward", self.low_backward) if low else self.high_format
        return form and replace(form, overflow="inf")


@dataclass(frozen=True)
class Assignment:
    """The names of the tensors that are low; gradients of weights never are."""

    forward: frozenset[str] = frozenset()
    """Activations and weights."""
    backward: frozenset[str] = frozenset()
    """Activations whose gradients are low."""

    def elements(self, graph: Graph) -> int:
        """Count the elements of the graph's tensors and gradients that are low."""
        return sum(
            tensor.numel * ((tensor.name in self.forward) + (tensor.name in self.backward))
            for tensor in graph.tensors
        )


def assign(graph: Graph, config: Precision) -> Assignment:
    """Choose the tensors that a config asks to be low.

    Args:
        graph: Of the model.
        config: `fp32` gives the assignment in which nothing is low.

    Returns:
        The names of the tensors that are low before any promotion.

    Example:
        >>> from memtrain.precision.graph import GraphTensor
        >>> tensors = GraphTensor("a", 8, 0), GraphTensor("b", 4, 1)
        >>> graph = Graph(tensors, ("l / linear",))
        >>> sorted(assign(graph, Precision(assignment="size_ordered", ratio=0.5)).forward)
        ['a']

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464,
        sections 3.1 and 4.1; Sun et al., HFP8 Training, NeurIPS 2019 (`operator`).
    """
    high = _kept_high(graph, config)
    if config.assignment == "uniform":
        return _all_of([tensor for tensor in graph.tensors if tensor.group not in high])
    if config.assignment in ("operator", "operator_out"):
        return _operator(graph, config, high)
    if config.assignment != SIZE_ORDERED:
        return Assignment()
    own = sizes(graph)
    # Of equal sizes the earlier group comes first.
    order = sorted(sorted(own), key=own.__getitem__, reverse=True)
    return demote(graph, [group for group in order if group not in high], config.ratio)


def sizes(graph: Graph) -> dict[int, int]:
    """Count the elements of each group's tensors, gradients of weights among them."""
    return {
        group: sum(tensor.elements for tensor in tensors)
        for group, tensors in graph.groups().items()
    }


def demote(graph: Graph, order: Sequence[int], ratio: float) -> Assignment:
    """Make whole groups low, one after another, until `ratio` of all elements is in them.

    Args:
        graph: Of the model.
        order: Groups.
        ratio: 0 to 1; gradients of weights count, though they stay high.

    Returns:
        The shortest prefix of `order` that reaches `ratio`, or all of it.
    """
    own, low, total = sizes(graph), 0, graph.elements
    chosen: set[int] = set()
    for group in order:
        if low >= ratio * total:
            break
        low += own[group]
        chosen.add(group)
    return _all_of([tensor for tensor in graph.tensors if tensor.group in chosen])


def _all_of(tensors: Sequence[GraphTensor]) -> Assignment:
    return Assignment(
        frozenset(tensor.name for tensor in tensors),
        frozenset(x.name for x in tensors if x.gradient and not x.weight),
    )


def _operator(graph: Graph, config: Precision, high: set[int]) -> Assignment:
    tensors = [tensor for tensor in graph.tensors if tensor.group not in high]
    outputs = config.assignment == "operator_out"
    first = {1} if config.keep_first else set()  # the group of the first GEMM's output
    return Assignment(
        frozenset(x.name for x in tensors if x.gemm_input or (outputs and x.gemm_output)),
        frozenset(
            x.name
            for x in tensors
            if x.gemm_output and x.gradient and not x.weight and x.group not in first
        ),
    )


def _kept_high(graph: Graph, config: Precision) -> set[int]:
    """Give the groups at the ends: 0 feeds the first GEMM, the last is the last one's output."""
    return ({0} if config.keep_first else set()) | (
        {len(graph.gemms)} if config.keep_last else set()
    )


def _named(field: str, name: str) -> FloatFormat:
    try:
        form = named_format(name)
    except ValueError as error:
        raise ValueError(f"precision.{field}={name!r}: {error}") from error
    return form


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"precision.{field}={value!r}; allowed: {', '.join(allowed)}")

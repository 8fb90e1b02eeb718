"""Which tensors of training are low: the paper's assignment, its ablations and its baselines."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memtrain.precision.graph import Graph, Value
from memtrain.precision.options import Precision


@dataclass(frozen=True)
class Assignment:
    """The names of the values whose tensors are low; gradients of weights never are."""

    forward: frozenset[str] = frozenset()
    """Activations and weights."""
    backward: frozenset[str] = frozenset()
    """Activations whose gradients are."""

    def elements(self, graph: Graph) -> int:
        """How many elements of the graph's tensors are low."""
        forward = sum(value.numel for value in graph.values if value.name in self.forward)
        return forward + sum(value.numel for value in graph.values if value.name in self.backward)


def assign(graph: Graph, asked: Precision) -> Assignment:
    """The assignment that a config asks for.

    Args:
        graph: Of the model.
        asked: What; `fp32` gives the assignment in which nothing is low.

    Returns:
        The names of what is low before any promotion.

    Example:
        >>> from memtrain.precision.graph import Value
        >>> graph = Graph((Value("a", 8, 0), Value("b", 4, 1)), ("l / linear",))
        >>> sorted(assign(graph, Precision(assignment="size_ordered", ratio=0.5)).forward)
        ['a']

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464,
        sections 3.1 and 4.1; Sun et al., HFP8 Training, NeurIPS 2019 (`operator`).
    """
    high = _kept_high(graph, asked)
    if asked.assignment == "uniform":
        return _all_of([value for value in graph.values if value.group not in high])
    if asked.assignment in ("operator", "operator_out"):
        return _operator(graph, asked, high)
    if asked.assignment not in _ORDERS:
        return Assignment()
    order = _ORDERS[asked.assignment](sizes(graph), asked.seed)
    return demote(graph, [group for group in order if group not in high], asked.ratio)


def sizes(graph: Graph) -> dict[int, int]:
    """Group -> the elements of all its tensors, gradients of weights among them."""
    return {
        group: sum(value.elements for value in values) for group, values in graph.groups().items()
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
    return _all_of([value for value in graph.values if value.group in chosen])


def _decreasing(own: dict[int, int], seed: int) -> list[int]:
    return sorted(own, key=lambda group: (-own[group], group))


def _increasing(own: dict[int, int], seed: int) -> list[int]:
    return sorted(own, key=lambda group: (own[group], group))


def _random(own: dict[int, int], seed: int) -> list[int]:
    order = sorted(own)
    random.Random(seed).shuffle(order)
    return order


_ORDERS: dict[str, Callable[[dict[int, int], int], list[int]]] = {
    "size_ordered": _decreasing,
    "increasing": _increasing,
    "random": _random,
}


def _all_of(values: Sequence[Value]) -> Assignment:
    return Assignment(
        frozenset(value.name for value in values),
        frozenset(value.name for value in values if value.gradient and not value.weight),
    )


def _operator(graph: Graph, asked: Precision, high: set[int]) -> Assignment:
    values = [value for value in graph.values if value.group not in high]
    gives = asked.assignment == "operator_out"
    first = {1} if asked.keep_first else set()  # the group of the first GEMM's output
    return Assignment(
        frozenset(v.name for v in values if v.read or (gives and v.made)),
        frozenset(
            v.name
            for v in values
            if v.made and v.gradient and not v.weight and v.group not in first
        ),
    )


def _kept_high(graph: Graph, asked: Precision) -> set[int]:
    """Group 0 feeds the first GEMM; the last group is what the last one gives."""
    return ({0} if asked.keep_first else set()) | ({len(graph.gemms)} if asked.keep_last else set())

"""Kinks of a compiled graph: what its backward asks of noisy tensors, kept in one bit an element.

A ReLU's backward asks where its output is above 0, and AOTAutograd may compute that output again
from what is saved: of a compressed tensor, some elements come back on the other side. The forward
knows the true answers, which take a bit each beside the payload.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from memtrain.activations.intercept.graph_order import calls, put_behind
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.flatten import layout_of
from memtrain.compressors import Mask


class Kink(NamedTuple):
    """Bools that a backward computes of saved tensors, and the forward's own."""

    asked: Node
    """Of the backward."""
    behind: frozenset[Node]
    """The bools of the backward that it is made of, itself among them."""
    answer: Node
    """Of the forward, which reads it nowhere."""
    carrier: Node
    """The saved tensor, of the same sizes, beside whose payload the answer may be kept."""


def find_kinks(forward: Graph, backward: Graph, is_lossy: Callable[[Node], bool]) -> list[Kink]:
    """Find the bools that a backward computes of saved tensors, and let the forward compute them.

    Args:
        forward: As partitioned; changed in place.
        backward: Its backward.
        is_lossy: Whether a saved tensor may come back as another one.

    Returns:
        Those of known sizes that the forward computes by the same ops.
    """
    known = {node.name: node for node in forward.nodes}
    place = {node: number for number, node in enumerate(forward.nodes)}
    twins: dict[Node, Node] = {}  # node of the backward -> the forward's, of the same value
    noisy: dict[Node, list[Node]] = {}  # node of the backward -> what is lossy of its inputs
    behind: dict[Node, frozenset[Node]] = {}  # bools of the backward that the forward had not
    spots: dict[Node, Node] = {}  # those that it has now -> the node behind which they are put
    ends: dict[Node, Node] = {}  # such a node -> the last that is put behind it
    for node in backward.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            if (twin := known.get(node.name)) is not None:
                twins[node], noisy[node] = twin, [twin] if is_lossy(twin) else []
            continue
        if node.op != "call_function" or not inputs or not all(one in twins for one in inputs):
            continue
        noisy[node] = [*dict.fromkeys(saved for one in inputs for saved in noisy[one])]
        called = map_arg((node.target, node.args, node.kwargs), twins.__getitem__)
        twin = known.get(node.name)
        if twin is not None and (twin.target, twin.args, twin.kwargs) == called:
            twins[node] = twin
        elif noisy[node] and _is_bool(node):
            sources = [spots.get(twins[one], twins[one]) for one in inputs]
            spot = max(sources, key=place.__getitem__)
            twin = forward.create_node("call_function", *called)
            put_behind(ends.get(spot, spot), twin)
            twin.meta["val"] = node.meta["val"]
            twins[node], spots[twin], ends[spot] = twin, spot, twin
            made_of = [behind[one] for one in inputs if one in behind]
            behind[node] = frozenset({node}).union(*made_of)
    return [
        Kink(node, bools, twins[node], carrier)
        for node, bools in behind.items()
        if not all(user in behind for user in node.users)
        for carrier in [one for one in noisy[node] if _sizes(one) == _sizes(node) is not None][:1]
    ]


def stand_in(x: Tensor, kink: Kink, number: int) -> list[Tensor]:
    """The payload of a kink's answer, as the carrier's hook can give it: of other bools.

    Args:
        x: The carrier's value.
        kink: Its answer takes the place of those bools in `keep_answers`.
        number: Of the kink, by which that finds the op.
    """
    return payload_ops.compress(x != 0, _form(kink), (0, -number, 0, 0, 0))


def keep_answers(forward: Graph, backward: Graph, kinks: dict[int, Kink]) -> None:
    """Let the backward read the forward's answers.

    Args:
        forward: With the hooks of the carriers inlined; changed in place.
        backward: As well.
        kinks: By the numbers that `stand_in` was given; 1 or more.
    """
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    for node in calls(forward, torch.ops.memtrain.compress_saved.default):
        key: Any = node.args[2]
        kink = kinks.get(-key[1])
        if kink is None:
            continue
        (other,) = node.all_input_nodes
        node.replace_input_with(other, kink.answer)
        erase_unread(forward, other)
        (bits,) = (inputs[part.name] for part in node.users)
        value = kink.asked.meta["val"]
        op = torch.ops.memtrain.decompress_saved.default
        given = ([bits], _form(kink), [*value.shape], torch.bool)
        with backward.inserting_before(kink.asked):
            again = backward.create_node("call_function", op, given)
        again.meta["val"] = value
        kink.asked.replace_all_uses_with(again)
        erase_unread(backward, kink.asked)


def _form(kink: Kink) -> str:
    x = kink.asked.meta["val"]
    layout = layout_of(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
    return payload_ops.form_of(Mask(), layout, Mask.parts)


def _is_bool(node: Node) -> bool:
    x = node.meta.get("val")
    return isinstance(x, Tensor) and x.dtype == torch.bool


def _sizes(node: Node) -> list[int] | None:
    """Of the node's tensor; None where they are symbolic."""
    shape = [*node.meta["val"].shape]
    return shape if all(isinstance(size, int) for size in shape) else None


def erase_unread(graph: Graph, node: Node) -> None:
    """Take a node out of a graph, and what only it read, if nothing reads it.

    Args:
        graph: Changed in place.
        node: Of an op without effects.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and not node.users:
            waiting += node.all_input_nodes
            graph.erase_node(node)

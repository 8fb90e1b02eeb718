"""Recomputed tensors of a compiled backward: compressed while they wait for their readers.

A partitioner that saves little (`activation_memory_budget`) lets the backward compute much of the
forward again at once, as the last layer's tensors are made of those of all layers before. What the
first layers' derivatives read then waits while the backward of all later ones runs, as a saved
tensor waits between forward and backward; so it is held like one.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from memtrain.activations.intercept.graph_kinks import erase_unread
from memtrain.activations.intercept.graph_order import put_behind
from memtrain.activations.intercept.graph_sites import nbytes_of
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.pack_hook import SIDE_RATIO

Held = tuple[str, Sequence[int]]
"""How a recomputed tensor is held, and the key for its random bits."""

NEAR = 1
"""Products at most between two readers for which a tensor is not idle: it is about to be read."""
aten = torch.ops.aten
_COMPRESS = payload_ops.compress_op.default


def compress_recomputed(graph: Graph, choose: Callable[[Node, list[Node]], Held | None]) -> None:
    """Compress the recomputed tensors that are idle at the peak of a backward, until none is.

    What reads such a tensor before the peak reads it as it is. What reads it afterwards is given it
    decompressed: views and pointwise functions are computed again from what they are made of, and
    what is decompressed from a saved payload is so once more.

    Args:
        graph: A backward, whose ops run in the order of its nodes; changed in place.
        choose: Called with a recomputed tensor and the ops that read it, or what is made of it,
            late: how to hold it, or None to keep it.
    """
    done: set[Node] = set()
    payloads: dict[Node, list[Node]] = {}
    nodes = {*graph.nodes}
    while (peak := _peak(graph)) is not None and peak not in done:
        _Idle(graph, peak, nodes, payloads).compress(choose)
        done.add(peak)


class _Idle:
    """The recomputed tensors that are read before an op and after it, and not by it."""

    def __init__(
        self, graph: Graph, peak: Node, nodes: set[Node], payloads: dict[Node, list[Node]]
    ) -> None:
        self.graph, self.payloads = graph, payloads
        tensors = (x for node in graph.nodes for x in _tensors(node.meta.get("val")))
        self.mode: Any = next(x.fake_mode for x in tensors if isinstance(x, FakeTensor))
        self.place = {node: number for number, node in enumerate(graph.nodes)}
        self.at = self.place[peak]
        self.late: dict[Node, list[Node]] = {}
        """Tensor -> what reads it late."""
        self.roots: dict[Node, frozenset[Node]] = {}
        """Node before the peak -> those of which it can be computed again; itself, if of none."""
        self.again: dict[Node, Node] = {}
        products = list(accumulate(map(_is_product, graph.nodes)))
        wanted: set[Node] = set()
        for node in _recomputed(graph):
            if self.place[node] >= self.at:
                break
            roots = self.roots[node] = self._roots(node, wanted)
            users = [user for user in node.users if user.target is not _COMPRESS]
            readers = [user for user in users if self.place[user] > self.at]
            if (
                not readers
                or peak in users
                or node not in nodes
                or any(user.op == "output" for user in users)
            ):
                continue
            if "recompute" in node.meta:  # activation checkpointing's: asked for as it is
                continue
            early = max(self.place[one] for one in (node, *set(users).difference(readers)))
            first = min(self.place[one] for one in readers)
            if products[first - 1] - products[early] > NEAR:
                self.late[node] = readers
                wanted |= roots

    def compress(self, choose: Callable[[Node, list[Node]], Held | None]) -> None:
        readers: dict[Node, list[Node]] = {}
        for node, late in self.late.items():
            for root in self.roots[node]:
                readers.setdefault(root, []).extend(late)
        given = {root: self._payload(root, late, choose) for root, late in readers.items()}
        moved = [node for node in self.late if all(given[root] for root in self.roots[node])]
        uses = [(user, node) for node in moved for user in self.late[node]]
        for user, node in sorted(uses, key=lambda use: self.place[use[0]]):
            user.replace_input_with(node, self._again(node, user))
        for node in moved:
            erase_unread(self.graph, node)
        for root in readers:
            if root in self.payloads:
                self._put_early(root)

    def _roots(self, node: Node, wanted: set[Node]) -> frozenset[Node]:
        if not _is_cheap(node):
            return frozenset({node})
        found = frozenset[Node]().union(*(self.roots.get(one, ()) for one in _large_inputs(node)))
        return found if len(found) < 2 or found <= wanted else frozenset({node})

    def _payload(self, root: Node, readers: list[Node], choose: Callable[..., Any]) -> bool:
        """Whether there is a payload of a tensor, perhaps from now on."""
        if root.target in payload_ops.DECOMPRESS or root in self.payloads:
            return True
        held = choose(root, readers)
        if held is None:
            return False
        op = self._node(root.next, f"{root.name}_held", _COMPRESS, (root, *held))
        parts = [(op, number) for number in range(len(op.meta["val"]))]
        self.payloads[root] = [self._node(op.next, f"{op.name}_part", getitem, at) for at in parts]
        return True

    def _again(self, node: Node, reader: Node) -> Node:
        """The value of a node, computed in front of the first op that reads it late."""
        roots = self.roots.get(node)
        if roots is None:  # an input of the graph
            return node
        if node in self.again:
            return self.again[node]
        target, args, kwargs = node.target, node.args, node.kwargs
        if node not in roots:
            inputs = {one: self._again(one, reader) for one in _large_inputs(node)}
            args, kwargs = map_arg((args, kwargs), lambda one: inputs.get(one, one))
        elif target not in payload_ops.DECOMPRESS:
            x, parts = node.meta["val"], self.payloads[node]
            _, form, _ = parts[0].all_input_nodes[0].args
            target = payload_ops.decompressing([part.meta["val"] for part in parts])
            args = parts, form, [*x.shape], x.dtype
        new = self._node(reader, f"{node.name}_again", target, args, kwargs)
        new.meta = {**node.meta, "val": new.meta["val"]}
        self.again[node] = new
        return new

    def _put_early(self, root: Node) -> None:
        """Put the op that compresses a tensor behind the last that reads it before the peak."""
        op = self.payloads[root][0].all_input_nodes[0]
        early = [user for user in root.users if self.place.get(user, self.at) < self.at]
        last = max([root, *(user for user in early if user is not op)], key=self.place.__getitem__)
        for moved in reversed([op, *self.payloads[root]]):
            put_behind(last, moved)

    def _node(self, before: Node, name: str, target: Any, args: Any, kwargs: Any = None) -> Node:
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        given = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given[0], **given[1])
        return node


def _recomputed(graph: Graph) -> list[Node]:
    """The ops of a backward that read no gradient."""
    behind: set[Node] = set()
    found: list[Node] = []
    for node in graph.nodes:
        if _is_gradient(node) or any(one in behind for one in node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function":
            found.append(node)
    return found


def _is_gradient(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def _is_product(node: Node) -> bool:
    """Whether an op is bound by its arithmetic: a product of matrices or a convolution."""
    from torch.utils.flop_counter import flop_registry  # which imports triton

    return getattr(node.target, "overloadpacket", None) in flop_registry


def _is_view(node: Node) -> bool:
    """Whether its value lies in the storage of its first input."""
    if node.target is getitem:
        (source,) = node.all_input_nodes
        return source.target is not getitem and _is_view(source)
    views = getattr(node.target, "is_view", False)
    return views or node.target in (aten._unsafe_view.default, aten.reshape.default)


def _is_cheap(node: Node) -> bool:
    """Whether it is computed again rather than held: not bools, which noise would turn."""
    if _is_view(node):
        return True
    tags = getattr(node.target, "tags", ())
    is_bool = getattr(node.meta.get("val"), "dtype", None) == torch.bool
    return torch.Tag.pointwise in tags and not is_bool


def _large_inputs(node: Node) -> list[Node]:
    """Those of about its own size: not the statistics and weights that it reads too."""
    own = _nbytes(node)
    return [one for one in node.all_input_nodes if _nbytes(one) * SIDE_RATIO > own]


def _nbytes(node: Node) -> int:
    return sum(nbytes_of(x) for x in _tensors(node.meta.get("val")))


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]


def _peak(graph: Graph) -> Node | None:
    """The op beside which most bytes are alive, each op's results taken to be written out."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    owner: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for node in graph.nodes:
        viewed = node.op == "call_function" and _is_view(node)
        owner[node] = owner[node.all_input_nodes[0]] if viewed else node
        for one in node.all_input_nodes:
            last[owner[one]] = place[node]
    change = [0] * (len(place) + 1)
    for node, number in place.items():
        if str(node.target).startswith("primals"):  # the forward's inputs: alive anyway
            continue
        if owner[node] is node and isinstance(node.meta.get("val"), torch.Tensor):
            nbytes = _nbytes(node)
            change[0 if node.op == "placeholder" else number] += nbytes
            change[last.get(node, number) + 1] -= nbytes
    alive, most, found = 0, 0, None
    for node, number in place.items():
        alive += change[number]
        if alive > most and node.op == "call_function":
            most, found = alive, node
    return found

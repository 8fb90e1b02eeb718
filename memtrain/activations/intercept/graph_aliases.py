"""Saved tensors of a compiled graph that are views of one another: held once.

A partitioner saves the output of an attention for its own backward, and, as another view of the
same memory, for the projection that reads it. Plain, the two are one storage; compressed, each
would have a payload.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from memtrain.activations.intercept.graph_sites import is_static, storage_of
from memtrain.activations.saved.flatten import memory_of

aten = torch.ops.aten


def read_one_of_aliases(saved: list[Node], backward: Graph) -> set[Node]:
    """Let a backward read one of the saved tensors that hold the same elements, for all of them.

    Args:
        saved: Of the forward.
        backward: Changed in place.

    Returns:
        Those that it reads no more.
    """
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    known: dict[Any, Node] = {}
    unread: set[Node] = set()
    for node in saved:
        if node.name not in inputs or not is_static(node):
            continue
        x = node.meta["val"]
        memory = memory_of(x)[1]
        if memory is None:
            continue
        one = known.setdefault((storage_of(node), x.dtype, memory), node)
        if one is not node and x.numel() == one.meta["val"].numel():
            alias = inputs[node.name]
            if alias.users:
                again = _as(inputs[one.name], alias, backward)
                alias.replace_all_uses_with(again)
            unread.add(node)
    return unread


def _as(source: Node, alias: Node, graph: Graph) -> Node:
    """A node of the alias's sizes, of the elements of a source in the order of their memory."""
    (_, given, _), (shape, order, _) = (memory_of(n.meta["val"])[0] for n in (source, alias))
    steps = [
        (aten.permute.default, [*given]),
        (aten.reshape.default, [shape[dim] for dim in order]),
        (aten.permute.default, [order.index(dim) for dim in range(len(order))]),
    ]
    place = next(node for node in graph.nodes if node in alias.users)
    for target, sizes in steps:
        with graph.inserting_before(place):
            node = graph.call_function(target, (source, sizes))
        with source.meta["val"].fake_mode:
            node.meta["val"] = target(source.meta["val"], sizes)
        source = node
    return source

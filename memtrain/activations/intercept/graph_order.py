"""Where a compiled graph compresses and decompresses: next to a tensor's other uses."""

from operator import getitem

import torch
from torch.fx import Graph, Node

from memtrain.activations.saved.payload_ops import DECOMPRESS

_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel)


def compress_early(graph: Graph) -> None:
    """Move each compressing op behind the last other op that reads its tensor, or a view of it.

    AOTAutograd puts what a hook packs at the end of the forward, so that all saved tensors would be
    alive there beside their payloads.

    Args:
        graph: A forward, changed in place.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in calls(graph, torch.ops.memtrain.compress_saved.default):
        saved = node.args[0]
        if isinstance(saved, Node):
            last = max(_readers(saved, node), key=place.__getitem__)
            parts = [user for user in node.users if user.target is getitem]
            for moved in reversed([node, *parts]):
                if place[last] < place[node]:
                    put_behind(last, moved)


def decompress_late(graph: Graph) -> None:
    """Move each decompressing op in front of the first op that reads what it gives.

    Args:
        graph: A backward, changed in place.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in calls(graph, *DECOMPRESS):
        if node.users:
            min(node.users, key=place.__getitem__).prepend(node)


def calls(graph: Graph, *ops: object) -> list[Node]:
    """The nodes of a graph that call one of some ops."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in ops]


def _readers(saved: Node, compresses: Node) -> list[Node]:
    """The node itself, and the ops before the output that read its elements."""
    others = (user for user in saved.users if user is not compresses and user.op != "output")
    return [saved, *(user for user in others if user.target not in _SIZES)]


def put_behind(last: Node, moved: Node) -> None:
    """Put a node behind another one; behind all inputs, if that is one."""
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    last.append(moved)

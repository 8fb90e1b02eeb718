"""Where a compiled graph compresses and decompresses: next to a tensor's other uses."""

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from memtrain.activations.intercept.compiler_internals import no_modes
from memtrain.activations.saved.attention import KERNELS
from memtrain.activations.saved.payload_ops import DECOMPRESS

_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel)


def compress_early(graph: Graph) -> None:
    """Move each compressing op behind the last other op that reads its tensor, or a view of it.

    AOTAutograd puts what a hook packs at the end of the forward, so that all saved tensors would be
    alive there beside their payloads.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in calls(graph, torch.ops.memtrain.compress_saved.default):
        saved = node.args[0]
        if isinstance(saved, Node):
            last = max(_readers(saved, node), key=place.__getitem__)
            parts = [user for user in node.users if user.target is getitem]
            for moved in reversed([node, *parts]):
                if place[last] < place[node]:
                    while last.op == last.next.op == "placeholder":  # behind all inputs
                        last = last.next
                    last.append(moved)


def decompress_late(graph: Graph) -> None:
    """Move each decompressing op in front of the first op that reads what it gives."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in calls(graph, *DECOMPRESS):
        if node.users:
            min(node.users, key=place.__getitem__).prepend(node)


def recompute_attention(graph: Graph, coded: Collection[str]) -> None:
    """Recompute the results of fused attention for coded queries and keys (`FusedAttention`)."""
    kernels = {kernel.backward: kernel for kernel in KERNELS.values()}
    for node in calls(graph, *kernels):
        kernel: Any = kernels[node.target]
        names = [argument.name for argument in kernel.backward._schema.arguments]
        args: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if not any(_is_coded(args[name], coded) for name in ("query", "key")):
            continue
        options = {name: args[name] for name in ("is_causal", "scale") if name in args}
        tensors = [args.get(name) for name in kernel.inputs]
        masks = dict(zip(kernel.inputs[3:], tensors[3:], strict=True))
        with graph.inserting_before(node), no_modes():
            options |= {**masks, **kernel.options}
            new = graph.call_function(kernel.forward, tuple(tensors[:3]), options)
            values = map_arg((new.args, new.kwargs), lambda given: given.meta["val"])
            new.meta = {**node.meta, "val": kernel.forward(*values[0], **values[1])}
            for index in (0, 1) if not args["dropout_p"] else (1,):  # the mask is gone
                result = graph.call_function(getitem, (new, index))
                result.meta = {**node.meta, "val": new.meta["val"][index]}
                saved = args[("out", "logsumexp")[index]]
                saved.replace_all_uses_with(result, delete_user_cb=lambda user, at=node: user is at)
                while not saved.users and saved.op == "call_function":  # nothing decompresses it
                    above = saved.all_input_nodes[0]
                    graph.erase_node(saved)
                    saved = above


def _is_coded(node: Node, coded: Collection[str]) -> bool:
    """Whether a node is computed from a tensor that is decompressed."""
    waiting, seen = [node], set[Node]()
    while waiting:
        one = waiting.pop()
        if one.target in DECOMPRESS or one.name in coded:
            return True
        if one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def calls(graph: Graph, *ops: object) -> list[Node]:
    """The nodes of a graph that call one of some ops."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in ops]


def _readers(saved: Node, compresses: Node) -> list[Node]:
    """The node itself, and the ops before the output that read its elements."""
    others = (user for user in saved.users if user is not compresses and user.op != "output")
    return [saved, *(user for user in others if user.target not in _SIZES)]

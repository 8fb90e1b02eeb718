"""Read the saved tensors of autograd nodes, and register hooks on them."""

from collections.abc import Callable, Collection, Container, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FUNCTION = ("saved_tensors",)
"""Where an `autograd.Function` of Python holds its saved tensors."""
LEAF = 2**64 - 1
"""Number of the nodes that accumulate gradients."""


def is_function(node: type) -> bool:
    """Return whether a node is that of an `autograd.Function` written in Python."""
    return issubclass(node, torch.autograd.function.BackwardCFunction)


def nodes_since(
    mark: int,
    results: Sequence[Any],
    first: int,
    known: Container[int],
    on_others: Callable[[], None],
) -> list[Any]:
    """Return the nodes that an op has made, as they were made.

    Their numbers are not below `mark`. `on_others` is called if a result depends on a node below
    `first`, the forward's first, that is not `known`: an earlier forward's, or another thread's,
    whose nodes have numbers of their own.
    """
    nodes: list[Any] = []
    for x in results:  # comprehensions are functions to call
        if isinstance(x, Tensor):
            nodes.append(x.grad_fn)
    new: dict[int, Any] = {}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        number = node._sequence_nr()
        if mark <= number != LEAF and number not in new:
            new[number] = node
            for above in node.next_functions:
                nodes.append(above[0])
        elif number < first and number not in known:
            on_others()
    return [*new.values()] if len(new) < 2 else [new[number] for number in sorted(new)]


@lru_cache(maxsize=4096)
def saved_names(node: type) -> tuple[str, ...]:
    """Return the attributes under which nodes of a class hold saved tensors."""
    if is_function(node):
        # What a compiled graph saves is recorded, and compressed, where the graph is compiled.
        compiled = hasattr(getattr(node, "_forward_cls", None), "compiled_bw")
        return () if compiled else FUNCTION
    prefix = "_raw_saved_"
    return tuple(name[len(prefix) :] for name in dir(node) if name.startswith(prefix))


def tensors_of(node: Any, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return what a node saves, and under which attribute, "" where no hooks can be registered.

    Skips tensors that were modified in place: the backward raises for them.
    """
    found: list[tuple[str, Tensor]] = []
    for name in names:
        try:
            value = node.saved_tensors if names is FUNCTION else getattr(node, f"_saved_{name}")
        except RuntimeError:
            continue
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple | list):
            of_function = names is FUNCTION
            found += [
                (str(index) if of_function else "", x)
                for index, x in enumerate(value)
                if isinstance(x, Tensor)
            ]
    return found


def _unpack(handle: Any) -> Tensor:
    return handle.unpack()


def hook(node: Any, attribute: str, handle: Any, unpack: Callable[[Any], Tensor] = _unpack) -> None:
    """Let a node hold a handle in place of a saved tensor, unless it has hooks that no mode saw."""
    if attribute.isdecimal():
        raw = node._raw_saved_tensors[int(attribute)]
    else:
        raw = getattr(node, f"_raw_saved_{attribute}")
    try:
        raw.register_hooks(lambda _: handle, unpack)
    except RuntimeError as error:
        if "hooks have already been set" not in str(error):
            raise


def flows_into(node: Any, source: Any, nodes: Collection[int]) -> bool:
    """Return whether the gradient of a node reaches a node that saved the same tensor.

    An unbiased gradient needs independent errors of the factors that are multiplied on the way: of
    `h * h * h`, where both products save h, the two payloads of h need random bits of their own.

    `source` is the node of the tensor, whose own gradient does not have it as a factor; `nodes` are
    the numbers of the nodes that saved the tensor before.
    """
    if max(nodes, default=0) > node._sequence_nr():
        return True  # the node waited for later ones, whose gradients may reach it
    above = [each for each, _ in node.next_functions if each is not None]
    if source in above:
        above.remove(source)
    first, seen = min(nodes, default=LEAF), set[int]()
    while above:
        each = above.pop()
        number = each._sequence_nr()
        if number in nodes:
            return True
        if first < number < LEAF and number not in seen:
            seen.add(number)
            above += [one for one, _ in each.next_functions if one is not None]
    return False

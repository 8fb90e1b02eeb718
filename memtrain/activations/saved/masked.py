"""Find tensors that may hold numbers that stand for minus infinity, as masked scores do.

A -1e9, which is no error itself, leaves the codes of its group one step for all others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from memtrain.activations.saved.aliases import callables
from memtrain.activations.saved.attention import KERNELS
from memtrain.activations.saved.known_ops import (
    CONVOLUTIONS,
    LOG_SOFTMAX,
    NORMS,
    PRODUCTS,
    SOFTMAXES,
    class_of,
    node_classes,
)
from memtrain.activations.saved.site import tensors_of

_MASKS = node_classes("MaskedFillBackward0", "MaskedFillBackward1", "WhereBackward0")
_MASKS |= {LOG_SOFTMAX}  # the logarithm of a small probability is such a number
_WRITES = _MASKS | node_classes(
    *("ConstantPadNdBackward0", "CopySlices", "IndexFillBackward0", "IndexFillBackward1"),
    *("IndexPutBackward0", "IndexPutImplBackward0", "MaskedScatterBackward0", "MaximumBackward0"),
    *("ScatterBackward0", "ScatterBackward1", "SelectScatterBackward0", "SliceScatterBackward0"),
)
"""Nodes that write some elements."""
JOINS = _WRITES | node_classes(
    *("AddBackward0", "AddcdivBackward0", "AddcmulBackward0", "BaddbmmBackward0", "CatBackward0"),
    *("LerpBackward0", "LerpBackward1", "LerpBackward2", "RsubBackward0", "StackBackward0"),
    "SubBackward0",
)
"""Nodes whose output may hold such numbers if they are given a constant."""
_FUNCTIONS = callables("masked_fill", "masked_fill_", "masked_scatter", "pad", "where")
"""Functions all of whose constants are arguments."""
_LARGE = 16
"""Numbers up to this do not stand for minus infinity."""
_ENDS = (
    PRODUCTS
    | CONVOLUTIONS
    | NORMS
    | (SOFTMAXES - {LOG_SOFTMAX})
    | frozenset(KERNELS)
    | node_classes("ExpBackward0", "SigmoidBackward0", "TanhBackward0")
)
"""Nodes whose output adds up, divides or bounds the numbers. What they add to has them still."""


def constants_of(node: Any, function: Any, args: Sequence[Any]) -> dict[int, type]:
    """Return the number and the class of a node in `JOINS` if it may put such numbers in.

    `args` are the arguments of the torch function that was called.
    """
    kind = type(node)
    has_constant = kind in _WRITES
    for above, _ in node.next_functions:  # without a function, whose calls take time
        has_constant = has_constant or above is None
    if not has_constant:
        return {}
    found = {node._sequence_nr(): kind}
    constants = [x for x in tensors_of(args, {}) if not x.requires_grad]
    if function in _FUNCTIONS:
        numbers = [x for x in args if isinstance(x, int | float)]
        small = all(abs(x) <= _LARGE for x in numbers)  # false for a NaN
        return {} if small and not any(x.is_floating_point() for x in constants) else found
    return found if kind in _WRITES or any(x.dim() > 0 for x in constants) else {}


def may_be_masked(node: Any, joins: Mapping[int, type], *, any_constant: bool) -> bool:
    """Return whether what the output of a node is made of may hold such numbers.

    `joins` is made of what `constants_of` returns. If not `any_constant`, those nodes count alone
    that apply masks.
    """
    nodes, seen = [node], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = class_of(node)
        joined = joins.get(node._sequence_nr())
        if joined and (any_constant or joined in _MASKS):
            return True
        for above, _ in node.next_functions:
            if kind not in _ENDS or hasattr(node, "_saved_alpha"):
                nodes.append(above)
            if kind in _ENDS:  # a product may be added to the first
                break
    return False

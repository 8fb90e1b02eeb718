"""Find factors that may be masked scores: numbers that stand for minus infinity among others.

The gradient of a learned temperature adds up the scores, and a -1e9 leaves the codes of its group
one step for all others.
"""

from collections.abc import Container, Sequence
from typing import Any

from memtrain.activations.saved.known_ops import (
    MULTIPLIES,
    SAME_VALUES,
    SENTINELS,
    node_classes,
)
from memtrain.activations.saved.site import tensors_of

JOINS = node_classes(
    *("AddBackward0", "BaddbmmBackward0", "CatBackward0", "StackBackward0", "SubBackward0"),
)
"""Nodes whose output may hold such numbers if one of their inputs is a constant tensor."""
_WRITES = node_classes(
    *("ConstantPadNdBackward0", "CopySlices", "IndexFillBackward0", "IndexFillBackward1"),
    *("IndexPutBackward0", "IndexPutImplBackward0", "MaskedScatterBackward0", "MaximumBackward0"),
    *("ScatterBackward0", "ScatterBackward1", "SelectScatterBackward0", "SliceScatterBackward0"),
)
"""Nodes that write some elements, which may be such numbers."""
_SELECTS = (
    SAME_VALUES
    | MULTIPLIES
    | node_classes(
        *("CatBackward0", "DivBackward0", "GatherBackward0", "IndexBackward0"),
        *("IndexSelectBackward0", "SplitBackward0", "SplitWithSizesBackward0", "StackBackward0"),
        "UnbindBackward0",
    )
)
"""Nodes whose output has elements of an input, times something else."""
_STEPS = 6


def constants_of(node: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of a node in `JOINS` if it adds or joins a tensor without a gradient.

    `args` are the arguments of the torch function that was called.
    """
    for above, _ in node.next_functions:
        if above is None:
            joined = any(x.dim() > 0 and not x.requires_grad for x in tensors_of(args, {}))
            return (node._sequence_nr(),) if joined else ()
    return ()


def may_be_masked(node: Any, joins: Container[int]) -> bool:
    """Whether a mask was applied to the output of a node, or to what it views or selects.

    `joins` has the numbers that `constants_of` gives.
    """
    nodes = [(node, _STEPS)]
    while nodes:
        node, steps = nodes.pop()
        kind = type(node)
        if kind in SENTINELS or kind in _WRITES or (node and node._sequence_nr() in joins):
            return True
        if steps and kind in _SELECTS:
            nodes += [(above, steps - 1) for above, _ in node.next_functions]
    return False

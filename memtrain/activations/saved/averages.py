"""How many elements of an input each element of an op's output is made of."""

from math import prod
from typing import Any

from memtrain.activations.saved.known_ops import (
    ADAPTIVE_POOLS,
    CONVOLUTIONS,
    NORMS,
    POOLS,
    PRODUCTS,
    SUMS,
    VECTOR_NORMS,
    class_of,
)

FEW = 8
"""Fewer products may have a sum that is small, which a root or a logarithm may read. The gradient
of log(sum(h^2)) has a cosine of 0.09 for 2 squares, 0.934 for 4, 0.983 for 8 and 0.990 for 128,
with normal h in 4 bits."""
AVERAGES = SUMS | PRODUCTS | CONVOLUTIONS | POOLS | ADAPTIVE_POOLS | NORMS
"""Nodes of ops that add elements of their input, or divide by a norm of them."""


def elements_read(node: Any, position: int) -> int:
    """Return the elements of input `position` that an element of an average's output is made of."""
    kind, (source, index) = class_of(node), node.next_functions[position]
    shape = source._input_metadata[index].shape
    if kind in PRODUCTS:
        factor = position - hasattr(node, "_saved_alpha")  # where there is one, a sum comes first
        if factor not in (0, 1):
            return 1
        return shape[-2] if factor and len(shape) > 1 else shape[-1]
    if kind in CONVOLUTIONS:
        weight = node._saved_weight.shape
        if node._saved_transposed:
            each = weight[0] // node._saved_groups * prod(weight[2:])
            return each // prod(node._saved_stride)
        return prod(weight[1:])
    if kind in POOLS:
        return prod(node._saved_kernel_size)
    if kind in NORMS:
        return _normalized(node, shape)
    if kind in VECTOR_NORMS and not 1 <= node._saved_ord <= 2:  # the largest one, or a root
        return 1
    return prod(shape) // max(1, prod(node._input_metadata[0].shape))


def is_averaged(node: Any, factor: str) -> bool:
    """Return whether the gradient that a factor goes into is a sum of `FEW` products or more.

    This is so if a `MulBackward0` broadcasts the other factor, such as a learned temperature.
    """
    source, index = node.next_functions[factor == "self"]
    if source is None:
        return False
    other = prod(source._input_metadata[index].shape)
    return FEW * other <= prod(node._input_metadata[0].shape)


def _normalized(node: Any, shape: Any) -> int:
    if hasattr(node, "_saved_normalized_shape"):
        return prod(node._saved_normalized_shape)
    if not getattr(node, "_saved_training", True):  # a product with constants
        return 1
    if hasattr(node, "_saved_group"):
        return node._saved_C // node._saved_group * node._saved_HxW
    return prod(shape) // shape[1]

"""Nodes of a compiled graph: their tensors, and which function of torch they come from."""

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from memtrain.activations.intercept.op_families import FAMILIES
from memtrain.activations.saved.aliases import callables

aten = torch.ops.aten

# The elements of their first argument, in the same number.
VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
)


_PRODUCTS = """
linear matmul mm bmm mv addmm addmv addbmm baddbmm einsum _grouped_mm grouped_mm __matmul__
__rmatmul__
"""
# As in the known-op table: the backward is linear in what it saves, or memtrain has a form of its
# own for the op outside of graphs.
_COMPRESSED = """
dot mul multiply addcmul exp square nll_loss embedding dropout where masked_fill gather index_select
max_pool1d max_pool2d max_pool3d __mul__ __rmul__
"""
# Their backward reads no values.
_READ_NOTHING = """
add sub neg __add__ __radd__ __sub__ __rsub__ __neg__ view reshape transpose permute expand
expand_as cat stack split chunk unbind to float half bfloat16 type type_as contiguous clone sum mean
unsqueeze squeeze flatten unflatten pad roll flip narrow select repeat repeat_interleave tile
__getitem__ movedim swapaxes swapdims t
"""
PRODUCTS = _PRODUCTS.split()
CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]
NORMS = ["layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"]
AVERAGE_POOLS = [f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)]
SATURATING = ["softmax", "log_softmax", "cross_entropy", "scaled_dot_product_attention"]
SATURATING += ["multi_head_attention_forward"]
PIECEWISE = FAMILIES["@piecewise"]
NONLINEAR = tuple(name for name in FAMILIES["@nonlinear"] if "_tanh" not in name)
_OPERATORS = (operator.mul, operator.imul, operator.matmul, operator.add, operator.iadd)
_OPERATORS += (operator.sub, operator.isub, operator.neg, operator.getitem)
_KNOWN_NAMES = (*PRODUCTS, *CONVOLUTIONS, *NORMS, *AVERAGE_POOLS, *SATURATING, *NONLINEAR)
_KNOWN_NAMES += (*_COMPRESSED.split(), *_READ_NOTHING.split())
KNOWN_FUNCTIONS = callables(*_KNOWN_NAMES, *(f"{name}_" for name in NONLINEAR)) | {*_OPERATORS}
"""Torch functions whose nodes in a backward may read compressed tensors."""
_SQUARES = callables("pow", "__pow__", "square") | {operator.pow}


def stripped(node: Node) -> Node:
    """Return the node that a node is a view or a copy of, with all its elements."""
    while node.op == "call_function" and node.target in VIEWS:
        above = node.args[0]
        if not isinstance(above, Node):
            break
        node = above
    return node


def is_tensor(node: Node) -> bool:
    """Return whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def storage_of(node: Node) -> int:
    """Return an identity of the storage of the node's tensor."""
    return node.meta["val"].untyped_storage()._cdata


def storage_nbytes(node: Node) -> int:
    """Bytes of the storage that the node's tensor is a view of, maybe of a part only."""
    return _hint(node.meta["val"].untyped_storage().nbytes())


def example(node: Node) -> Tensor:
    """A meta tensor of the sizes that the graph was traced with, symbolic ones as they were."""
    x = node.meta["val"]
    return torch.empty_strided(
        [_hint(size) for size in x.shape],
        [_hint(stride) for stride in x.stride()],
        dtype=x.dtype,
        device="meta",
    )


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def reached(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes, and all that is computed of them."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def source_name(stack: Any) -> str:
    """Return the op's name in sites, of a stack of source functions."""
    if not stack:
        return "autograd.Function"
    text, target = stack[-1][:2]
    if not isinstance(target, type):
        text = target if isinstance(target, str) else getattr(target, "__name__", text)
    return re.sub(r"_\d+$", "", str(text)).strip("_")


def is_known(target: Any, name: str) -> bool:
    """Whether a source is known: a function, the name of a method of `Tensor`, or a class of `nn`.

    Of a module of torch's own, `name` is the function that its forward calls.
    """
    function = getattr(Tensor, target, None) if isinstance(target, str) else target
    if isinstance(function, type):
        return getattr(nn, function.__name__, None) is function and name in _KNOWN_NAMES
    try:
        return function in KNOWN_FUNCTIONS or (function in _SQUARES and name == "square")
    except TypeError:  # no hash
        return False

"""Which ops of a compiled graph read a result, or a product whose factor may be compressed."""

import sys
from collections.abc import Callable, Collection, Iterator
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from memtrain.activations.intercept.graph_nodes import (
    AVERAGE_POOLS,
    CONVOLUTIONS,
    NONLINEAR,
    NORMS,
    PIECEWISE,
    PRODUCTS,
    SATURATING,
    VIEWS,
    example,
    is_known,
    is_tensor,
    source_name,
)
from memtrain.activations.ops.norm_calls import FEW as FEW_NORMALIZED
from memtrain.activations.saved.averages import FEW
from memtrain.activations.saved.payload_ops import compress_op

aten = torch.ops.aten

# As `SavedBy.readers` of the known-op table, by the source of the ops.
_PRODUCTS = frozenset(name.strip("_") for name in PRODUCTS)
RESULTS = {
    "softmax": _PRODUCTS,
    "exp": _PRODUCTS,
    "sigmoid": frozenset[str](),  # a gate is multiplied first, and what reads the product is open
    "tanh": frozenset[str](),
}
"""Op whose result is saved -> ops that may read the result compressed."""
FACTORS = _PRODUCTS | {"mul", "imul", "multiply", "rmul", "pow", "square"}
"""Sources of ops that save factors."""
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_SMOOTH = frozenset(NONLINEAR).difference(PIECEWISE)
_FUNCTIONS = _SMOOTH | {"cross_entropy", "exp", "log_softmax", "softmax"}
"""Sources of ops whose backward computes a function of what it reads."""
_ENDS = (*PRODUCTS, *CONVOLUTIONS)
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_MASKS = (aten.where.self, aten.masked_fill.Scalar)
_SAME_VALUES = (*VIEWS, *_CASTS, *_MASKS, aten.expand.default, aten.slice.Tensor, aten.select.int)
_CHOOSES = (*_MASKS, aten.mul.Tensor, aten.index.Tensor, aten.index_select.default)
_CARRIES = {*_SAME_VALUES, *_CHOOSES, getitem}
_CARRIES |= {getattr(aten, name).default for name in ("neg", "cat", "stack", "repeat", "copy")}
_CARRIES |= {aten.constant_pad_nd.default, aten.flip.default, aten.roll.default}
_CARRIES |= {aten.split.Tensor, aten.unbind.int}
_CARRIES |= {aten.split_with_sizes.default, aten.native_dropout.default, aten.index_add.default}
_CARRIES |= {aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar}
_CARRIES |= {aten.mul.Scalar, aten.div.Scalar}
# These carry the products of matrices too.
_EXTREMES = {aten.exp.default, aten.amax.default, aten.amin.default, aten.gather.default}
_EXTREMES |= {aten.max.dim, aten.min.dim, aten.maximum.default, aten.minimum.default}
# Products of which either factor may be saved.
_MULTIPLIES = (aten.mul.Tensor, aten.pow.Tensor_Scalar)
_MATRIX_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default}
_MATRIX_PRODUCTS |= {aten.baddbmm.default, aten.addmv.default}
# Nodes that write constants, and whose output may hold numbers that stand for minus infinity.
_SENTINELS = {*_MASKS, aten.masked_fill.Tensor, aten._log_softmax.default}
_WRITES = {aten.index_put.default, aten.scatter.src, aten.scatter.value, aten.maximum.default}
_WRITES |= {aten.select_scatter.default, aten.slice_scatter.default, aten.copy.default}
_WRITES |= {aten.constant_pad_nd.default}
_BOUNDS = (*NORMS, *CONVOLUTIONS, *SATURATING, "exp", "sigmoid", "tanh")


class GraphReaders:
    """The ops of one forward graph that read its results and products.

    `fixed` are the graph's parameters and buffers, `weights` its parameters; no gradients reach the
    `constants`; `returned` are the nodes that the graph returns, and other code may read.
    """

    def __init__(
        self,
        fixed: Collection[Node],
        weights: Collection[Node],
        constants: Collection[Node],
        returned: Collection[Node],
    ) -> None:
        self.fixed, self.weights = fixed, weights
        self.constants, self.returned = constants, returned

    def misread_result(self, start: Node, op: str) -> bool:
        """Return whether an op that may not reads the result of an op of `RESULTS`."""

        def carries(user: Node, node: Node, name: str) -> bool:
            is_same = name == op and user.meta.get("seq_nr") == start.meta.get("seq_nr")
            return is_same or name == "dropout" or user.target in _SAME_VALUES

        return _is_misread(start, lambda user, node, name: name in RESULTS[op], carries, ())

    def misread_function(self, saved: Node, op: str) -> bool:
        """Return whether an op that may not reads a value of `op`, made of the saved tensor.

        The gradient of a logarithm or a quotient is largest where the value is 0. There that of
        log-probabilities is a difference of numbers that are nearly equal.
        """

        def carries(user: Node, node: Node, name: str) -> bool:
            return user.target in (_CARRIES if op in RESULTS else _SAME_VALUES)

        def misread(value: Node) -> bool:
            if RESULTS.get(op):
                return self.misread_result(value, op)
            returns = _is_misread(value, lambda user, node, name: True, carries, self.returned)
            return returns or self._misread(value, False, ())

        return op in _FUNCTIONS and any(misread(value) for value in self._values(saved, op))

    def _values(self, saved: Node, op: str) -> Iterator[Node]:
        """Yield what calls of `op` give, made of the tensor without a product in between.

        A backward may serve several calls with equal inputs, and it names one of them.
        """
        waiting, seen = [saved], set[Node]()
        while waiting:
            node = waiting.pop()
            for user in node.users:
                name = _name(user)
                if user in seen or name in _ENDS or user.op == "output":
                    continue
                seen.add(user)
                waiting.append(user)
                inside = [each for each in user.users if _name(each) == op]
                if name == op and (user in self.returned or len(inside) < len(user.users)):
                    yield user

    def misread_product(self, ops: Collection[Node], saved: Node) -> bool:
        """Return whether an op that may not reads the product of which the tensor is a factor.

        `ops` are the nodes of the op that saves the tensor.
        """
        for product in ops:
            factors = [arg for arg in product.args if isinstance(arg, Node)]
            if product.target in _MATRIX_PRODUCTS:
                if self._may_be_masked(saved, joins=False):
                    return True
                computed = all(_base(factor) not in self.fixed for factor in factors[-2:])
                return computed and self._misread(product, False, self.returned)
            if product.target in _MULTIPLIES:
                if self._may_be_masked(saved, joins=True):
                    return True
                out = example(product).numel()
                smallest = min(example(factor).numel() for factor in factors)
                if len(factors) == 2 and FEW * smallest <= out == example(saved).numel():
                    return self._misread(product, False, ())  # a residual stream may end it
                return self._misread(product, True, self.returned)
        return False

    def _misread(self, product: Node, elementwise: bool, returned: Collection[Node]) -> bool:
        def may_read(user: Node, node: Node, name: str) -> bool:
            if name in _PRODUCTS:
                return self._contracts(user, node)
            if name in CONVOLUTIONS and not self._is_weight(user.args[1]):
                return False
            return (not elementwise and name in SATURATING) or _averages(user, node, name) >= FEW

        def carries(user: Node, node: Node, name: str) -> bool:
            if user.target is aten.div.Tensor:
                return user.args[0] is node
            if user.target is aten.pow.Tensor_Scalar:
                return bool(user.args[1] == 2)
            if not elementwise and (user.target in _EXTREMES or name in NONLINEAR):
                return True
            chooses = elementwise and user.target in _CHOOSES and name != "dropout"
            if user.target is aten._fused_rms_norm.default:
                return _averages(user, node, name) >= FEW
            few = name not in NORMS and 0 < _averages(user, node, name) < FEW
            return few or (user.target in _CARRIES and not (chooses and self._chooses(user)))

        return _is_misread(product, may_read, carries, returned)

    def _may_be_masked(self, start: Node, *, joins: bool) -> bool:
        """As `masked.may_be_masked`, with `joins` by any op that writes constants."""
        waiting, seen = [start], set[Node]()
        while waiting:
            node = waiting.pop()
            is_index = is_tensor(node) and not example(node).is_floating_point()
            if node in seen or node in self.constants or is_index:
                continue
            seen.add(node)
            name, above = _name(node), node.all_input_nodes
            if node.target in _SENTINELS and name not in NONLINEAR:  # as softplus is written out
                return True
            if node.target in _MATRIX_PRODUCTS:
                above = [arg for arg in node.args[:-2] if isinstance(arg, Node)]
            elif name in _BOUNDS:
                continue
            if joins and (node.target in _WRITES or self._joins(node, above)):
                return True
            waiting += above
        return False

    def _joins(self, node: Node, above: Collection[Node]) -> bool:
        """Whether a node that does not multiply is made of a constant, other than a weight."""
        if node.target in (*_MULTIPLIES, aten.div.Tensor):
            return False
        return any(
            is_tensor(x) and example(x).dim() > 0 and example(x).is_floating_point()
            for x in above
            if x in self.constants and _base(x) not in self.weights
        )

    def _contracts(self, user: Node, node: Node) -> bool:
        """Whether a matrix product sums `FEW` elements or more, not those that one-hots select."""
        if user.target not in _MATRIX_PRODUCTS:
            return False
        factors = [arg for arg in user.args if isinstance(arg, Node)][-2:]
        other = factors[factors[0] is node]
        if node not in factors or not self._is_weight(other):
            return False
        shape = example(node).shape
        return shape[-1 if factors[0] is node or len(shape) == 1 else -2] >= FEW

    def _is_weight(self, factor: Any) -> bool:
        """Whether it is computed or a parameter, not a constant, which may select elements."""
        return factor not in self.constants or _base(factor) in self.weights

    def _chooses(self, user: Node) -> bool:
        """Whether a node chooses elements one by one, as a mask of their shape does."""
        choices = [arg for arg in user.all_input_nodes if arg in self.constants]
        entries = max((example(arg).numel() for arg in choices), default=0)
        return FEW * entries > example(user).numel()


def normalizes_few(ops: Collection[Node], name: str) -> bool:
    """Return whether a norm divides by the deviation of few elements.

    Of coded elements it is another one. `name` is the norm's, and `ops` are its nodes.
    """
    return name in NORMS and any(
        1 < _averages(op, op.args[0], name) <= FEW_NORMALIZED
        for op in ops
        if op.args and isinstance(op.args[0], Node) and is_tensor(op.args[0])
    )


def _averages(user: Node, node: Node, name: str) -> int:
    """Return how many elements of a node an average adds up; 0 for other ops."""
    if user.target in _SUMS or name in (*AVERAGE_POOLS, *NORMS):
        values = user.meta["val"]  # the second of a norm, or of var_mean, is a statistic
        out = values[1] if isinstance(values, tuple) else values
        return example(node).numel() // (int(out.numel()) or sys.maxsize)
    if name in CONVOLUTIONS:
        weight: Any = user.args[1]  # with a stride, a transposed one may add up fewer
        is_transposed = user.target is not aten.convolution.default or user.args[6]
        return 0 if is_transposed else example(weight).shape[1:].numel()
    return 0


def _is_misread(
    start: Node,
    may_read: Callable[[Node, Node, str], bool],
    carries: Callable[[Node, Node, str], bool],
    returned: Collection[Node],
) -> bool:
    waiting, seen = [start], {start}
    while waiting:
        node = waiting.pop()
        if node in returned:
            return True
        for user in node.users:
            if user.op == "output" or user in seen or user.target is compress_op.default:
                continue
            if "fwd_source_fn_stack" in user.meta:  # part of the backward
                continue
            name = _name(user)
            if carries(user, node, name):
                seen.add(user)
                waiting.append(user)
            elif not may_read(user, node, name):
                return True
    return False


def _name(node: Node) -> str:
    """Return the name of the known function of torch that a node is part of, or an empty string."""
    stack = node.meta.get("source_fn_stack")
    name = source_name(stack)
    return name if stack and is_known(stack[-1][1], name) else ""


def _base(node: Node) -> Node:
    while node.target in VIEWS or node.target in _CASTS:
        node = node.all_input_nodes[0]
    return node

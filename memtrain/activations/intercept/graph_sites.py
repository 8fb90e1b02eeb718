"""Sites of a compiled graph: which op of which module saves a tensor, read off its nodes."""

import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from memtrain.activations.intercept.op_families import FAMILIES
from memtrain.activations.saved.aliases import callables
from memtrain.activations.saved.attention import KERNELS
from memtrain.activations.saved.fit import FLOATS
from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.site import MODEL_INPUT, UNKNOWN_OP, UNKNOWN_READER, Site

aten = torch.ops.aten

# The elements of their first argument, in the same number.
_VIEWS = (
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
_ATTENTIONS = tuple(kernel.forward for kernel in KERNELS.values())
# Ops whose arguments have roles of their own -> those, in the order of the torch function.
_ORDER = {
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (1, 2, 0),
    aten.convolution.default: (0, 1, 2),
    aten.embedding.default: (1, 0),
    **dict.fromkeys(_ATTENTIONS, (0, 1, 2)),
}
_POOLS = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
_POOL_OFFSETS = "prims._low_memory_max_pool_with_offsets.default"  # inductor registers it

_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")

SIDE_RATIO = 16
"""A statistic such as a mean is this much smaller than what its op reads."""
LOGSUMEXP = "a statistic: attention's log-sum-exp"


# As in the known-op table: the backward is linear in what it saves, or memtrain has a form of its
# own for the op outside of graphs.
_COMPRESSED = """
linear matmul mm bmm mv dot addmm addmv addbmm baddbmm einsum _grouped_mm grouped_mm mul multiply
addcmul exp square conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
scaled_dot_product_attention softmax log_softmax cross_entropy nll_loss embedding dropout where
masked_fill gather index_select layer_norm rms_norm group_norm batch_norm instance_norm
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d __matmul__ __rmatmul__ __mul__ __rmul__
multi_head_attention_forward
"""
# Their backward reads no values.
_READ_NOTHING = """
add sub neg __add__ __radd__ __sub__ __rsub__ __neg__ view reshape transpose permute expand
expand_as cat stack split chunk unbind to float half bfloat16 type type_as contiguous clone sum mean
unsqueeze squeeze flatten unflatten pad roll flip narrow select repeat repeat_interleave tile
__getitem__ movedim swapaxes swapdims t
"""
# As `SavedBy.readers` of the table: op whose result is saved -> ops that may read it compressed.
_PRODUCTS = """
linear matmul mm bmm mv addmm addmv addbmm baddbmm einsum grouped_mm __matmul__ __rmatmul__
"""
_READERS = {
    "softmax": frozenset(_PRODUCTS.split()),
    "exp": frozenset(_PRODUCTS.split()),
    "sigmoid": frozenset[str](),  # a gate is multiplied first, and what reads the product is open
    "tanh": frozenset[str](),
}
_SAME_TEXT = """
dropout where masked_fill to float half bfloat16 type type_as contiguous clone view reshape
transpose permute expand expand_as unsqueeze squeeze flatten unflatten t
"""
_SAME_VALUES = frozenset(_SAME_TEXT.split())
_NONLINEAR = tuple(name for name in FAMILIES["@nonlinear"] if "_tanh" not in name)
_OPERATORS = (operator.mul, operator.imul, operator.matmul, operator.add, operator.iadd)
_OPERATORS += (operator.sub, operator.isub, operator.neg, operator.getitem)
_KNOWN_NAMES = (*_COMPRESSED.split(), *_READ_NOTHING.split(), *_NONLINEAR)
KNOWN_FUNCTIONS = callables(*_KNOWN_NAMES, *(f"{name}_" for name in _NONLINEAR)) | {*_OPERATORS}
"""Torch functions whose nodes in a backward may read compressed tensors."""
_SQUARES = callables("pow", "__pow__", "square") | {operator.pow}


class GraphSites:
    """Reads the saved tensors of one graph.

    `static` are the numbers of the forward's inputs that are parameters or buffers. If `sharded`,
    others may be parameters too, as FSDP2 gathers them for a forward.
    """

    def __init__(
        self,
        forward: Graph,
        backward: Graph,
        modules: Collection[str],
        root: str,
        static: Iterable[int],
        *,
        sharded: bool = False,
    ) -> None:
        self.modules, self.root, self.sharded = modules, root, sharded
        self._placed = {node.name: node for node in backward.nodes if node.op == "placeholder"}
        self._order = {node: index for index, node in enumerate(backward.nodes)}
        self._ops: dict[int, list[Node]] = {}
        for node in forward.nodes:
            if node.op == "call_function" and "seq_nr" in node.meta:
                self._ops.setdefault(node.meta["seq_nr"], []).append(node)
        inputs = [node for node in forward.nodes if node.op == "placeholder"]
        self._fixed = {inputs[index] for index in static if index < len(inputs)}
        data_inputs = [node for node in inputs if node not in self._fixed]
        (gradients,) = backward.output_node().args
        wanted = gradients if isinstance(gradients, tuple | list) else ()
        trained = [node for node, grad in zip(inputs, wanted, strict=False) if grad is not None]
        self.data_inputs = set(data_inputs)
        """Inputs that are no parameters or buffers."""
        self.model_inputs: set[int] | None = None
        """Storages of inputs that the user keeps alive; None: of all of them."""
        self._fed, self._differentiable = _reached(data_inputs), _reached(trained)

    def is_hooked(self, output: Any) -> bool:
        """Return whether an output of the forward is passed to hooks if it is saved."""
        return isinstance(output, Node) and is_tensor(output) and output not in self._fixed

    def uses(self, saved: Node) -> dict[Site, bool]:
        """Return the sites of the forward ops whose backward reads a tensor, in their order.

        Each has whether the op is one whose backward may read a compressed tensor.
        """
        found: dict[Site, bool] = {}
        for reader in self._readers(saved):
            site, known = self._use(reader, reader.meta["fwd_source_fn_stack"], saved)
            found[site] = found.get(site, True) and known
        return found

    def _readers(self, saved: Node) -> dict[Node, None]:
        """Nodes of the backward that read the tensor, or what is recomputed of the tensor."""
        start = self._placed.get(saved.name)
        waiting, seen = [] if start is None else [*start.users], set[Node]()
        found: dict[Node, None] = {}
        while waiting:
            user = waiting.pop(0)
            if user.op == "output" or user in seen:
                continue
            if user.meta.get("fwd_source_fn_stack"):
                found[user] = None
            else:  # part of the forward that runs again
                seen.add(user)
                waiting += user.users
        return found

    def is_chained(self, saved: Node) -> bool:
        """Return whether one gradient is multiplied by the tensor in two backwards.

        The errors of the two factors are equal, so that the product is biased (`flows_into`).
        """
        readers = self._readers(saved)
        if len({reader.meta.get("seq_nr") for reader in readers}) < 2:
            return False
        last = max(readers, key=lambda reader: self._order.get(reader, 0))
        for reader in readers:
            waiting, seen = [*reader.users], set[Node]()
            while waiting:
                user = waiting.pop()
                if user in seen or self._order.get(user, 0) > self._order.get(last, 0):
                    continue
                if user in readers and user.meta.get("seq_nr") != reader.meta.get("seq_nr"):
                    return True
                seen.add(user)
                waiting += user.users
        return False

    def site(self, saved: Node) -> Site:
        """Return a site for a tensor without known uses, named after the op that made it."""
        stack = saved.meta.get("source_fn_stack")
        return Site(self._module(saved.meta, "nn_module_stack"), source_name(stack), "saved")

    def why_keep(self, saved: Node, uses: Mapping[Site, bool], min_elements: int) -> str:
        """Return why the tensor is kept whatever the rules say, or an empty string."""
        x = example(saved)
        base = stripped(saved)
        unknown = next((site.op for site, known in uses.items() if not known), "")
        if unknown:
            return f"{UNKNOWN_OP} {unknown}"
        is_data = base in self.data_inputs
        if is_data and base not in self._differentiable and self._is_model_input(base):
            return MODEL_INPUT
        if is_data and self.sharded:
            return "an input of a sharded module's graph: perhaps a gathered weight"
        if x.numel() < min_elements:
            return f"under {min_elements:,} elements"
        if memory_of(x)[1] is None:
            return "its elements overlap in memory"
        if x.dtype in FLOATS and base not in self._fed:
            return "made of parameters and buffers alone"
        layers = all(site.op in _LAYERS and site.tensor == "input" for site in uses)
        is_layer_input = layers and bool(uses) and not (self.root and is_data)
        if x.dtype in FLOATS and base not in self._differentiable and not is_layer_input:
            # else layers read it as their input, whose weights alone have gradients
            return "no gradient reaches it: a mask, or a table of positions"
        if any(site.tensor == "saved" for site in uses):
            return self._statistic(saved, x) or self._unknown_reader(base, uses)
        return ""

    def _unknown_reader(self, base: Node, uses: Collection[Site]) -> str:
        """Say that an op reads a result which may not be compressed for it, or nothing."""
        op = next((site.op for site in uses if site.tensor == "saved"), "")
        readers = _READERS.get(op)
        waiting, seen = [base] if readers is not None else [], set[Node]()
        while waiting:
            for user in waiting.pop().users:
                if user.op == "output" or user in seen:
                    continue
                stack = user.meta.get("source_fn_stack")
                name = source_name(stack)
                known = bool(stack) and _is_known(stack[-1][1], name)
                is_same = name == op and user.meta.get("seq_nr") == base.meta.get("seq_nr")
                if is_same or (known and name in _SAME_VALUES):
                    seen.add(user)
                    waiting.append(user)
                elif not known or (readers is not None and name not in readers):
                    return UNKNOWN_READER
        return ""

    def _statistic(self, saved: Node, x: Tensor) -> str:
        """Which statistic of its own an op saves, or an empty string."""
        if x.dim() > 1 and x.shape[-1] == 1:
            return "a statistic: its last dimension is 1"
        if any(x.shape[:-1] == query.shape[:-2] for query in self._queries(saved)):
            return LOGSUMEXP
        if x.numel() * SIDE_RATIO <= max(self._reads(saved), default=0):
            return f"a statistic: {SIDE_RATIO} times smaller than what its op reads"
        return ""

    def _is_model_input(self, node: Node) -> bool:
        """Whether an input stays alive anyway: equal modules inside of the model share a graph."""
        return not self.root and (
            self.model_inputs is None or storage_of(node) in self.model_inputs
        )

    def checkpointed(self, saved: Node) -> bool:
        """Return whether activation checkpointing in the graph starts from the tensor."""
        users = [user for user in saved.users if user.op != "output"]
        return bool(users) and any("recompute" in user.meta for user in users)

    def limit(self, saved: Node) -> int | None:
        """Return the number below which the tensor's indices lie; None if it is unknown."""
        base = stripped(saved)
        if base.target is not getitem or base.args[1] != 1:
            return None
        source: Any = base.args[0]
        if str(source.target) == _POOL_OFFSETS:  # inside of the window
            return math.prod(source.args[1])
        if source.target not in _POOLS:
            return None
        dims = 2 if source.target is _POOLS[0] else 3
        return example(source.args[0]).shape[-dims:].numel()

    def _use(self, user: Node, stack: list[Any], saved: Node) -> tuple[Site, bool]:
        number, name = user.meta.get("seq_nr", -1), source_name(stack)
        ops = self._ops.get(number, [])
        if name == "pow" and any(_smooth_power(op) for op in ops):
            name = "square"
        role = self._role(stripped(saved), number, ops)
        site = Site(self._module(user.meta, "fwd_nn_module_stack"), name, role)
        return site, _is_known(stack[-1][1], name)

    def _role(self, base: Node, number: int, ops: list[Node]) -> str:
        """As of `Op.role`: of ops that graphs decompose, `input` or `saved` only."""
        for op in ops:
            order = _ORDER.get(op.target)
            if order is not None:
                arguments = [op.args[index] for index in order if index < len(op.args)]
                bases = [stripped(arg) for arg in arguments if isinstance(arg, Node)]
                if base in bases:
                    return f"input{bases.index(base) or ''}"
        return "saved" if base.meta.get("seq_nr") == number else "input"

    def _queries(self, saved: Node) -> Iterator[Tensor]:
        """Return the query of the fused attention that made the tensor, if one did."""
        for op in self._ops.get(saved.meta.get("seq_nr", -1), []):
            if op.target in _ATTENTIONS and isinstance(op.args[0], Node):
                yield example(op.args[0])

    def _reads(self, saved: Node) -> Iterator[int]:
        """Elements of what the ops that made the tensor read, parameters aside."""
        for op in self._ops.get(saved.meta.get("seq_nr", -1), []):
            for arg in op.args:
                if isinstance(arg, Node) and arg in self._fed and is_tensor(arg):
                    yield example(arg).numel()

    def _module(self, meta: dict[str, Any], key: str) -> str:
        stack = [path for path, _ in (meta.get(key) or {}).values()]
        for text in reversed(stack):
            parts = path_names(str(text))
            for start in range(len(parts)):
                tail = ".".join(parts[start:])
                for path in (f"{self.root}.{tail}" if self.root else tail, tail):
                    if path in self.modules:
                        return path
        return self.root


def stripped(node: Node) -> Node:
    """Return the node that a node is a view or a copy of, with all its elements."""
    while node.op == "call_function" and node.target in _VIEWS:
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


def _reached(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes, and all that is computed of them."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def path_names(text: str) -> list[str]:
    """Names of a path as the tracer writes it.

    Example:
        >>> path_names("L['self']._modules['h']['0'].mlp")
        ['L', 'self', 'h', '0', 'mlp']
    """
    names = re.sub(r"\['?([^\]']*)'?\]", r".\1", text).split(".")
    return [name for name in names if name and name != "_modules"]


def source_name(stack: Any) -> str:
    """Return the op's name in sites, of a stack of source functions."""
    if not stack:
        return "autograd.Function"
    text, target = stack[-1][:2]
    if not isinstance(target, type):
        text = target if isinstance(target, str) else getattr(target, "__name__", text)
    return re.sub(r"_\d+$", "", str(text)).strip("_")


def _is_known(target: Any, name: str) -> bool:
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


def _smooth_power(op: Node) -> bool:
    """Return whether it raises to a whole positive power, whose derivative has no pole."""
    if op.target is not aten.pow.Tensor_Scalar:
        return False
    exponent = op.args[1]
    return isinstance(exponent, int | float) and exponent >= 2 and float(exponent).is_integer()

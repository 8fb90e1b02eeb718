"""Sites of a compiled graph: which op of which module saves a tensor, read off its nodes."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from memtrain.activations.intercept import compiler_internals as internals
from memtrain.activations.intercept.graph_nodes import (
    example,
    is_known,
    is_tensor,
    reached,
    source_name,
    storage_of,
    stripped,
)
from memtrain.activations.intercept.graph_readers import (
    FACTORS,
    RESULTS,
    GraphReaders,
    normalizes_few,
)
from memtrain.activations.intercept.replaced_ops import recogniser
from memtrain.activations.saved.attention import KERNELS
from memtrain.activations.saved.fit import FLOATS
from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.site import MODEL_INPUT, UNKNOWN_OP, UNKNOWN_READER, Site

aten = torch.ops.aten

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


class GraphSites:
    """Reads the saved tensors of one graph.

    `static` are the numbers of the forward's inputs that are parameters or buffers, and
    `parameters` the model's. If `sharded`, others may be parameters too, as FSDP2 gathers them for
    a forward.
    """

    def __init__(
        self,
        forward: Graph,
        backward: Graph,
        modules: Collection[str],
        root: str,
        static: Iterable[int],
        parameters: list[Tensor | None],
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
        self._fed, self._differentiable = reached(data_inputs), reached(trained)
        outputs: Any = forward.output_node().args[0]
        left = Counter(node for node in outputs if isinstance(node, Node))
        left.subtract(node for node in [*left] if node.name in self._placed)
        returned = {node for node, times in left.items() if times > 0}
        storages = internals.input_positions(self._fixed, parameters)
        weights = {node for node in self._fixed if is_tensor(node) and storage_of(node) in storages}
        constants = {*forward.nodes} - self._differentiable
        self._read = GraphReaders(self._fixed, weights, constants, returned)

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
        statistic = self._statistic(saved, x) if any(u.tensor == "saved" for u in uses) else ""
        return statistic or (UNKNOWN_READER if self._misread(saved, uses) else "")

    def _misread(self, saved: Node, uses: Collection[Site]) -> bool:
        """Whether an op reads a result, or a product with the tensor, that may not."""
        results = {site.op for site in uses if site.tensor == "saved"} & RESULTS.keys()
        if any(self._read.misread_result(stripped(saved), op) for op in results):
            return True
        for reader in self._readers(saved):
            op = source_name(reader.meta["fwd_source_fn_stack"])
            ops = self._ops.get(reader.meta.get("seq_nr", -1), [])
            # The backward computes the result anew, from an input that is coded.
            if normalizes_few(ops, op):
                return True
            if self._read.misread_function(stripped(saved), op):
                return True
            if op in FACTORS and not _in_one_op(reader) and self._read.misread_product(ops, saved):
                return True
        return False

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
        return site, is_known(stack[-1][1], name)

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


def path_names(text: str) -> list[str]:
    """Names of a path as the tracer writes it.

    Example:
        >>> path_names("L['self']._modules['h']['0'].mlp")
        ['L', 'self', 'h', '0', 'mlp']
    """
    names = re.sub(r"\['?([^\]']*)'?\]", r".\1", text).split(".")
    return [name for name in names if name and name != "_modules"]


def _in_one_op(reader: Node) -> bool:
    """Whether it is part of a module that writes one op out, such as a GELU."""
    modules = [cls for _, cls in (reader.meta.get("fwd_nn_module_stack") or {}).values()]
    return bool(modules) and isinstance(modules[-1], type) and recogniser(modules[-1]) is not None


def _smooth_power(op: Node) -> bool:
    """Return whether it raises to a whole positive power, whose derivative has no pole."""
    if op.target is not aten.pow.Tensor_Scalar:
        return False
    exponent = op.args[1]
    return isinstance(exponent, int | float) and exponent >= 2 and float(exponent).is_integer()

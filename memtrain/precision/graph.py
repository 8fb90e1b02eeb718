"""The tensors of training of a model, in groups between two GEMMs, from a traced forward."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memtrain.activations.intercept.compiler_internals import is_compiled
from memtrain.activations.saved.fit import Choose
from memtrain.activations.saved.options import Options
from memtrain.activations.saved.site import tensors_of
from memtrain.activations.trace.fake_forward import trace
from memtrain.compressors import Keep
from memtrain.kernels.floats.rounding import DTYPES
from memtrain.precision.rounding_mode import RoundingMode
from memtrain.precision.tensor_names import GEMMS


class GraphTensor(NamedTuple):
    """An activation or a weight, with its gradient."""

    name: str
    """`module / op / output`, or the parameter's name."""
    numel: int
    group: int
    weight: bool = False
    gradient: bool = True
    """Whether it has a gradient: inputs of the model and frozen weights have none."""
    gemm_output: bool = False
    gemm_input: bool = False

    @property
    def elements(self) -> int:
        """The number of elements, including those of its gradient."""
        return self.numel * (1 + self.gradient)


@dataclass(frozen=True)
class Graph:
    """Activations, weights and gradients of a training step, in groups between two GEMMs.

    Group 0 begins with the model's input, group i with the output of the i-th GEMM, in the order of
    execution. A weight belongs to the group of the activation that its first op reads: the group
    that feeds its GEMM. Each tensor is in one group.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> print(graph_of(model, torch.ones(3, 4)))
        2 GEMMs, 4 activations, 4 weights; 236 elements with their gradients in 3 groups
        group 0: 92 elements
            (root) / input / input: 12
            0.weight: 32 + 32
            0.bias: 8 + 8
        group 1, of 0 / linear: 132 elements
            0 / linear / output: 24 + 24
            1 / relu / output: 24 + 24
            2.weight: 16 + 16
            2.bias: 2 + 2
        group 2, of 2 / linear: 12 elements
            2 / linear / output: 6 + 6
    """

    tensors: tuple[GraphTensor, ...]
    gemms: tuple[str, ...]
    """`module / op`, in the order of execution."""

    @property
    def elements(self) -> int:
        """The number of elements of all tensors of training."""
        return sum(tensor.elements for tensor in self.tensors)

    def groups(self) -> dict[int, list[GraphTensor]]:
        """Return the tensors by group, activations first, without empty groups."""
        found: dict[int, list[GraphTensor]] = {}
        for tensor in sorted(self.tensors, key=lambda tensor: (tensor.group, tensor.weight)):
            found.setdefault(tensor.group, []).append(tensor)
        return found

    def __str__(self) -> str:
        weights, groups = sum(tensor.weight for tensor in self.tensors), self.groups()
        lines = [
            f"{len(self.gemms)} GEMMs, {len(self.tensors) - weights} activations, "
            f"{weights} weights; {self.elements:,} elements with their gradients "
            f"in {len(groups)} groups"
        ]
        for number, tensors in groups.items():
            total = sum(tensor.elements for tensor in tensors)
            of = f", of {self.gemms[number - 1]}" if number else ""
            lines.append(f"group {number}{of}: {total:,} elements")
            for tensor in tensors:
                both = f" + {tensor.numel:,}" if tensor.gradient else ""
                lines.append(f"    {tensor.name}: {tensor.numel:,}{both}")
        return "\n".join(lines)


def graph_of(
    model: nn.Module,
    batch: Any,
    choose: Choose = lambda site: Keep(""),
    options: Options = Options(),  # noqa: B008 (a frozen value)
) -> Graph:
    """Trace one training forward on fake tensors; the model is not changed.

    The model and the batch are real or fake. The model's modes are kept if the root is in training
    mode; else all modules are traced in training mode. `choose` makes the plan's decisions for
    saved tensors, which may run a module as one op.

    Reference:
        Lee et al., Training with Mixed-Precision Floating-Point Assignments, arXiv:2301.13464,
        section 4.1.
    """
    recorder = GraphRecorder()
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        trace(model, batch, choose, options, rounding=recorder)
    finally:
        for module, training in modes.items():
            module.training = training
    graph = recorder.graph()
    if not graph.gemms:
        raise ValueError(
            f"{type(model).__name__} has no GEMM (linear, matmul, convolution, attention): "
            "there are no groups of tensors; allowed: precision.assignment=fp32"
        )
    return graph


def check(model: nn.Module) -> None:
    """Raise ValueError for dtypes without rounding, and for compiled or sharded modules."""
    check_interceptable(model)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(
                f"precision: {name} has dtype {parameter.dtype}; allowed: {allowed}, "
                "or precision.assignment=fp32"
            )


def check_interceptable(model: nn.Module) -> None:
    """Raise ValueError for compiled modules and for modules under `fully_shard`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ValueError(
                f"precision: {name or 'the model'} is under fully_shard (FSDP2), which "
                "replaces the weights in the forward; allowed: DistributedDataParallel, or "
                "precision.assignment=fp32"
            )
        if is_compiled(module):
            raise ValueError(
                f"precision: {name or 'the model'} is compiled, which hides its ops; "
                "allowed: an uncompiled model, or precision.assignment=fp32"
            )


class GraphRecorder(RoundingMode):
    """Records the tensors of a forward, without rounding."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[str, GraphTensor] = {}
        self._gemms: list[str] = []

    def graph(self) -> Graph:
        """Return the graph of the tensors so far."""
        return Graph(tuple(self._tensors.values()), tuple(self._gemms))

    def begin(self, model: nn.Module, module: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Record the inputs."""
        self._names.begin(model)
        self._sizes = {name: (p.numel(), p.requires_grad) for name, p in model.named_parameters()}
        for name, x in self._names.inputs(module, (args, kwargs)):
            self._add_tensor(name, x, gradient=x.requires_grad)
        return args, kwargs

    def result(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Record the op's results and weights."""
        read = [(x, self._names.name_of(x)) for x in tensors_of(args, kwargs)]
        results = self._names.results(module, op, args, kwargs, result)
        gemm = op in GEMMS
        single = isinstance(result, Tensor) and not result.dim()
        if not results and not gemm and not single:
            return result  # a view, a copy, a query of metadata
        weights = [name for name in (self._weight(x, name) for x, name in read) if name]
        source = next((self._tensors[name] for _, name in read if self._is_activation(name)), None)
        self._assign_weights(weights, source.group if source else len(self._gemms), gemm)
        if gemm:
            for _, name in read:
                if self._is_activation(name):
                    self._tensors[name] = self._tensors[name]._replace(gemm_input=True)
            self._gemms.append(f"{module or '(root)'} / {op}")
        # Reentrant checkpointing runs its forward without gradients first.
        inside = not torch.is_grad_enabled() and (weights or source)
        for name, y in results:
            if y.requires_grad or inside:
                self._add_tensor(name, y, gemm_output=gemm)
        return result

    def end(self, output: Any, *, completed: bool) -> Any:
        """Clear the storages."""
        self._names.clear()
        return output

    def _add_tensor(
        self, name: str, x: Tensor, *, gradient: bool = True, gemm_output: bool = False
    ) -> None:
        group = len(self._gemms)
        self._tensors[name] = GraphTensor(
            name, x.numel(), group, gradient=gradient, gemm_output=gemm_output
        )

    def _is_activation(self, name: str) -> bool:
        return name in self._tensors and not self._tensors[name].weight

    def _weight(self, x: Tensor, name: str) -> str:
        return name if name in self._sizes else self._names.parameter(x)

    def _assign_weights(self, weights: Sequence[str], group: int, gemm: bool) -> None:
        for name in weights:
            known = self._tensors.get(name)
            if known is None:
                numel, gradient = self._sizes[name]
                known = GraphTensor(name, numel, group, weight=True, gradient=gradient)
            self._tensors[name] = known._replace(gemm_input=known.gemm_input or gemm)

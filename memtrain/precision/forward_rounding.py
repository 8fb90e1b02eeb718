"""Rounding of a forward's weights and results, and of their gradients, to float formats."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.activations.intercept.compiler_internals import runs_under_dynamo
from memtrain.activations.saved.origin import in_transform
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.trace.call_arguments import CallArguments
from memtrain.compressors import Compressor, Float
from memtrain.kernels.floats.formats import FORMATS, FloatFormat
from memtrain.precision.graph import check_interceptable
from memtrain.precision.loss_scaling import (
    LossScaler,
    is_training_forward,
    parameters_bypassing_rounding,
    results_alive_after,
    tensors_in,
    weak_results,
)
from memtrain.precision.rounding_mode import NOT_INTERCEPTED, RoundingMode
from memtrain.precision.state import PrecisionState
from memtrain.precision.tensor_names import METADATA, TensorNames, roundable, writes


class ForwardRounding(RoundingMode):
    """Rounds to the formats of a `PrecisionState`.

    An op's result is rounded in place, so that the backward reads the rounded one. A hook rounds
    its gradient, the sum over all readers. A weight is rounded when an op reads it; its gradient is
    rounded and unscaled in the backward. A trace counts and scales nothing.
    """

    def __init__(self, state: PrecisionState, *, is_trace: bool = False) -> None:
        super().__init__()
        self.state, self.is_trace = state, is_trace
        self.scaler = LossScaler(state)
        self._checked: set[str] = set()  # modules whose whole forward has been checked
        self._tracing = False
        self._saved: SavedTensors | None = None
        self._clear()

    def _clear(self) -> None:
        self._names = TensorNames()
        self._rounded: dict[str, weakref.ref[Tensor]] = {}
        self._counts = False  # whether overflows count: in training forwards
        # sites and results, while a forward is checked
        self._results: list[tuple[str, weakref.ref[Tensor]]] | None = None
        self._model: nn.Module | None = None

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_names", "_rounded", "_counts", "_results", "_model")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def attach(self, saved: SavedTensors) -> None:
        """Let `saved` keep weights and rounded tensors exactly."""
        self._saved, saved.lossless = saved, self.exact

    def before_model(
        self, assign: Callable[[nn.Module, Any], None], model: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Assign formats by a trace of the model's first forward: a forward pre-hook.

        `assign` traces a model's forward on a batch, and assigns formats to its tensors.
        """
        if runs_under_dynamo() or torch.jit.is_tracing() or in_transform():
            raise RuntimeError(NOT_INTERCEPTED)
        check_interceptable(model)
        if self.state.graph is not None or self._tracing:
            return
        self._tracing = True
        try:
            assign(model, tree_map_only(Tensor, _detached, CallArguments(args, kwargs)))
        finally:
            self._tracing = False

    def begin(self, model: nn.Module, module: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Round the inputs."""
        if self.state.graph is None:
            raise RuntimeError(
                f"{module or 'the model'} runs before the tensors of training are known: call the "
                "model itself first, or give wrap a batch"
            )
        self._clear()
        self._names.begin(model)
        self._model, self._module = model, module
        self._counts = is_training_forward() and not self.is_trace
        if self._counts:
            self.scaler.begin(model)
        if self._counts and module not in self._checked:
            self._results = []
        inputs = (args, kwargs)
        changed = {id(x): self._input(name, x) for name, x in self._names.inputs(module, inputs)}
        return tree_map_only(Tensor, lambda x: changed.get(id(x), x), inputs)

    def _input(self, name: str, x: Tensor) -> Tensor:
        known = self.state.is_traced(name)
        float_format = self.state.forward_format(name) if known else None
        gradient_format = self.state.backward_format(name) if known else None
        if is_training_forward():
            y = self.scaler.round_leaf(
                x, name, partial(self._round, name, float_format), gradient_format
            )
        else:  # in a recomputation gradients are not rounded
            y = x if float_format is None else self._round(name, float_format, x)
        if float_format is not None:
            self._names.assign(y, name)
        return y

    def arguments(
        self, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Replace parameters by rounded weights."""
        args, kwargs = super().arguments(module, name, args, kwargs)
        if name.strip("_") in METADATA:
            return args, kwargs
        target = args[0] if args and writes(name, kwargs) else None
        named = {key: self._read(x, target) for key, x in kwargs.items()}
        return [self._read(x, target) for x in args], named

    def _read(self, x: Any, target: Any) -> Any:
        # A recursive closure would keep `target` alive until a garbage collection.
        if type(x) in (list, tuple):
            return type(x)(self._read(item, target) for item in x)
        if not isinstance(x, Tensor) or x is target:
            return x
        parameter = self._names.parameter(x)
        return self._weight(x, parameter) if parameter and roundable(x) else x

    def _weight(self, x: Tensor, name: str) -> Tensor:
        known = self._rounded[name]() if name in self._rounded and x._base is None else None
        if known is not None:
            return known
        float_format = self.state.forward_format(name)
        gradient_format = self.state.gradient_format
        seed = self.state.seed(name, float_format, weight=True)
        y = self.scaler.round_leaf(
            x, name, partial(self._round, name, float_format, seed=seed), gradient_format
        )
        if float_format is None:
            return y
        self._names.assign(y, name)
        if x._base is None:
            self._rounded[name] = weakref.ref(y)
        return y

    def result(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Round an op's results."""
        for name, y in self._names.results(module, op, args, kwargs, result):
            if not self.state.is_traced(name):
                if not y.requires_grad:
                    self._names.forget(y)
                    continue
                self.state.untraced.setdefault(name)
            float_format, gradient_format = (
                self.state.forward_format(name),
                self.state.backward_format(name),
            )
            if float_format is None:
                self._names.forget(y)
            else:
                # `data` hides the write from autograd: a softmax shall save the rounded result.
                seed = self.state.seed(name, float_format)
                self._count(name, float_format.round_count_(y.data, seed=seed), y.numel())
            if gradient_format is not None and y.requires_grad:
                y.register_hook(
                    partial(self.scaler.round_gradient, name=name, float_format=gradient_format)
                )
        if self._results is not None:
            site = f"{module or '(root)'} / {op}"
            self._results += [(site, ref) for ref in weak_results(result)]
        return result

    def end(self, output: Any, *, completed: bool) -> Any:
        """Register the scaling of the outputs' gradients."""
        results, model = self._results, self._model
        self._clear()
        if not completed or self.is_trace:
            return output
        if results is not None and model is not None:
            self._check(output, results, model)
        return self.scaler.scale_gradients_of(output)

    def _check(
        self, output: Any, results: list[tuple[str, weakref.ref[Tensor]]], model: nn.Module
    ) -> None:
        """Check once for gradients that would bypass the loss scale."""
        self._checked.add(self._module)
        if not self.state.scale.active:
            return
        bypassed = parameters_bypassing_rounding(tensors_in(output), model)
        if bypassed:
            raise RuntimeError(
                f"{', '.join(bypassed[:5])}: read only by a custom autograd Function or a "
                "TorchScript module, so the loss scale would remain in the gradient; allowed: "
                "precision.loss_scale=none"
            )
        if self._saved is not None and self._saved.saw_hooks:
            return  # tensors of checkpointing or offloading are no loss terms
        alive = results_alive_after(results, output)
        if alive:
            warnings.warn(
                f"the result of {alive[0]} ({len(alive)} such) outlives the forward without being "
                "an output of the model: a loss term that uses it does not carry the loss scale. "
                "Return it from the forward, or set precision.loss_scale=none",
                stacklevel=2,
            )

    def exact(self, x: Tensor, claimed: bool) -> Compressor | None:
        """Return a compressor that keeps a rounded tensor bit for bit, or None.

        If a rule compresses the saved tensor (`claimed`), only weights are kept exactly.
        """
        name = self._names.name_of(x)
        if not name or (claimed and name not in self._rounded):
            return None
        float_format = self.state.forward_format(name)
        return None if float_format is None else _float_compressor(float_format)

    def _round(
        self, name: str, float_format: FloatFormat | None, x: Tensor, *, seed: int | None = None
    ) -> Tensor:
        if float_format is None:
            return x.detach()
        seed = self.state.seed(name, float_format) if seed is None else seed
        y, count = float_format.round_count(x, seed=seed)
        self._count(name, count, x.numel())
        return y

    def _count(self, name: str, overflows: Tensor, numel: int) -> None:
        if self._counts and self.state.config.promotion is not None and self.state.is_low(name):
            self.scaler.count_overflows(name, overflows, numel)


def _detached(x: Tensor) -> Tensor:
    """Return `x` without its graph."""
    return x.detach().requires_grad_(x.requires_grad)


@lru_cache
def _float_compressor(float_format: FloatFormat) -> Float:
    return Float(
        format=next((name for name, one in FORMATS.items() if one == float_format), float_format)
    )

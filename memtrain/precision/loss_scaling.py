"""Scaling of gradients at the model's outputs, unscaling at its weights, and skipped steps."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memtrain.environment import is_called_from
from memtrain.kernels.floats.formats import FloatFormat
from memtrain.optim.wrappers.dtypes import map_tensors
from memtrain.optim.wrappers.gradient_norms import read
from memtrain.precision.state import PrecisionState

# Dtypes of torch's op on every device (2.11): it has no CUDA kernel for bfloat16.
_UNSCALED_BY_TORCH = (torch.float16, torch.float32, torch.float64)
MAX_DEPTH = 6  # nesting of objects in an output, such as a cache of keys and values


class LossScaler:
    """Scales gradients at the model's outputs, unscales them at its weights and inputs.

    A gradient that reaches a parameter by another path (a penalty on the weights) never carries the
    scale. At the end of each backward pass through an output, overflows are counted, tensors may be
    promoted and the scale may change; under DistributedDataParallel, equally in all processes. A
    step whose gradients overflowed is skipped.
    """

    def __init__(self, state: PrecisionState) -> None:
        self.__setstate__({"state": state, "overflowed": False, "device": torch.device("cpu")})
        self._is_copy = False

    def _clear(self) -> None:
        self._counts: dict[str, tuple[Tensor, int]] = {}  # overflows and elements
        # As in torch's GradScaler: 1 if a weight's gradient is not finite; 1 / scale.
        self._found_inf: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._finite: list[Tensor] = []  # whether the gradients of outputs are finite
        self._scaled = False  # whether gradients of the current pass carry the scale

    def __getstate__(self) -> dict[str, object]:
        return {"state": self.state, "overflowed": self.overflowed, "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state: PrecisionState = state["state"]
        self.overflowed: bool = state["overflowed"]
        """Whether a gradient has overflowed since the last step: the step must be skipped."""
        self.device: torch.device = state["device"]
        self.group: Any = None
        """The processes that train replicas of the model and decide together."""
        self._hidden: list[tuple[Tensor, Tensor]] = []  # gradients, in a skipped step
        self._handles: list[Any] = []
        self._is_copy = True  # of a model: torch does not copy the hooks of its optimizer
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._clear()

    def attach(self, optimizer: Optimizer) -> Self:
        """Register hooks on an optimizer, whose step finds no gradients if they overflowed.

        Parameters, states and step counts then stay. The gradients are restored after the step.
        `remove` removes the hooks.
        """
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def attach_copy(self, optimizer: Optimizer) -> None:
        """Register the hooks if the optimizer steps the copied model."""
        model = self._model()
        parameters = {param for group in optimizer.param_groups for param in group["params"]}
        if model is not None and not parameters.isdisjoint(model.parameters()):
            _COPIES.discard(self)
            self.attach(optimizer)

    def remove(self) -> None:
        """Remove the hooks."""
        _COPIES.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def count_overflows(self, name: str, overflows: Tensor, numel: int) -> None:
        """Add the overflows of a forward's tensor of `numel` elements."""
        before = self._counts.get(name)
        both = (before[0] + overflows, before[1] + numel) if before else (overflows, numel)
        self._counts[name] = both

    def begin(self, model: nn.Module) -> None:
        """Begin a training forward: find the process group of a replica."""
        ddp = DistributedDataParallel._active_ddp_module
        self.group = None if ddp is None else ddp.process_group
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if self._is_copy:  # here, so that copies for evaluation are never registered
            self._is_copy, self._model = False, weakref.ref(model)
            _COPIES.add(self)
            _register_copy_hook()

    def scale_gradients_of(self, output: Any) -> Any:
        """Return the model's output, with gradients that will be scaled.

        Without a gradient, and in a recomputation, whose gradients are scaled already, the output
        is returned as it is.
        """
        if not is_training_forward():
            return output
        return map_tensors(partial(self._output, {}), output)

    def _output(self, known: dict[int, Tensor], x: Tensor) -> Tensor:
        if not x.requires_grad or not x.is_floating_point():
            return x
        if id(x) not in known:  # not a view, so that users can change it in place
            known[id(x)] = _StraightThrough.apply(x, Tensor.detach, self._scale)
        return known[id(x)]

    def _scale(self, grad: Tensor) -> Tensor:
        """Scale an output's gradient, at the beginning of a backward pass through the model."""
        if not self._scaled:
            self._scaled = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if not self.state.scale.active:
            return grad
        self._finite.append(grad.detach().isfinite().all())
        return grad * self.state.scale.value

    def round_leaf(
        self,
        x: Tensor,
        name: str,
        rounded: Callable[[Tensor], Tensor],
        float_format: FloatFormat | None,
    ) -> Tensor:
        """Round a weight or an input; its gradient is rounded to `float_format`, and unscaled."""
        return _StraightThrough.apply(
            x, rounded, partial(self._unscale, name=name, float_format=float_format)
        )

    def _unscale(self, grad: Tensor, name: str, float_format: FloatFormat | None) -> Tensor:
        grad = (
            grad.clone() if float_format is None else self.round_gradient(grad, name, float_format)
        )
        scale = self.state.scale
        if not scale.active or not self._scaled:
            return grad
        found = self._found_inf.get(grad.device)
        if found is None:
            zero = torch.zeros((), dtype=torch.float32, device=grad.device)
            found = self._found_inf[grad.device] = (zero, torch.full_like(zero, 1 / scale.value))
        unscale(grad, *found)
        return grad

    def round_gradient(self, grad: Tensor, name: str, float_format: FloatFormat) -> Tensor:
        """Round a gradient to its format; raise under `create_graph=True`: no derivative exists."""
        _refuse_double_backward()
        return float_format.round(grad, seed=self.state.seed(f"gradient of {name}", float_format))

    def _end_backward(self) -> None:
        counts, found_inf = self._counts, self._found_inf
        finite = self._finite
        self._clear()
        overflows = read([one for one, _ in counts.values()])
        pairs = zip(counts.items(), overflows, strict=True)
        shares = {name: (count, numel) for (name, (_, numel)), count in pairs}
        overflow = any(bool(one) for one, _ in found_inf.values())
        bad_loss = not all(bool(one) for one in finite)
        if self.group is not None:
            overflow, bad_loss, shares = self._all_reduce(overflow, bad_loss, shares)
        self.state.promote({name: count / numel for name, (count, numel) in shares.items()})
        if not self.state.scale.active:
            return
        # A loss that is not finite is the user's: no smaller scale would help.
        overflow = overflow and not bad_loss
        self.overflowed |= overflow
        self.state.scale.update(overflow=overflow)

    def _all_reduce(
        self, overflow: bool, bad_loss: bool, shares: Mapping[str, tuple[float, float]]
    ) -> tuple[bool, bool, dict[str, tuple[float, float]]]:
        """Combine the arguments of all processes by one all-reduce."""
        names = [tensor.name for tensor in self.state.graph.tensors] if self.state.graph else []
        pairs = [shares.get(name, (0, 0)) for name in names]
        numbers = [float(overflow), float(bad_loss), *(number for pair in pairs for number in pair)]
        table = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(table, group=self.group)
        overflows, bad_losses, *rest = table.tolist()
        pairs = zip(names, zip(rest[::2], rest[1::2], strict=True), strict=True)
        return overflows > 0, bad_losses > 0, {name: pair for name, pair in pairs if pair[1]}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scale = self.state.scale
        if scale.active and is_called_from("torch.amp.grad_scaler"):
            scale.disable("left to the GradScaler that calls the optimizer")
        overflowed, self.overflowed = self.overflowed, False
        if not overflowed or scale.off:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._hidden.append((p, p.grad))
                    p.grad = None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        hidden, self._hidden = self._hidden, []
        for p, grad in hidden:
            p.grad = grad


_COPIES: weakref.WeakSet[LossScaler] = weakref.WeakSet()
"""Scalers of copied models whose optimizers have not stepped yet."""


@cache
def _register_copy_hook() -> None:
    """Register a permanent hook on all optimizers, by which copied models find theirs."""

    def attach_copies(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for scaler in [*_COPIES]:
            scaler.attach_copy(optimizer)

    register_optimizer_step_pre_hook(attach_copies)


class _StraightThrough(torch.autograd.Function):
    """A function of a tensor, with another function applied to the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _refuse_double_backward()
        return ctx.gradient(grads[0]), None, None


def unscale(grad: Tensor, found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply a gradient by 1 / scale in place; set `found_inf` to 1 if it is not finite.

    `found_inf` and `inverse`, which is 1 / scale, are float32 scalars.
    """
    if grad.dtype in _UNSCALED_BY_TORCH:
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inverse)
    else:
        found_inf.copy_(torch.maximum(found_inf, (~grad.isfinite().all()).to(found_inf.dtype)))
        grad.mul_(inverse)


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "rounded gradients cannot be differentiated a second time (create_graph=True); "
            "allowed: precision.assignment=fp32"
        )


def is_training_forward() -> bool:
    """Return whether a forward runs for training: no evaluation, no recomputation."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def weak_results(result: Any) -> list[weakref.ref[Tensor]]:
    """Return weak references to the tensors with gradients in an op's result.

    Empty tensors are omitted: torch 2.11's checkpointing makes some.
    """
    results = result if isinstance(result, tuple | list) else (result,)
    return [
        weakref.ref(y)
        for y in results
        if isinstance(y, Tensor)
        and y.requires_grad
        and y.numel()
        and not isinstance(y, nn.Parameter)
    ]


def results_alive_after(
    results: Iterable[tuple[str, weakref.ref[Tensor]]], output: Any
) -> list[str]:
    """Return the sites of results that are alive after a forward and not in its output."""
    outputs = list(tensors_in(output))
    known = {id(x) for x in (*outputs, *(x._base for x in outputs))}
    alive = [site for site, ref in results if (y := ref()) is not None and id(y) not in known]
    return list(dict.fromkeys(alive))


def tensors_in(value: Any, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in an object's containers and attributes."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, str | bytes | type | nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), depth - 1)


def parameters_bypassing_rounding(outputs: Iterable[Tensor], model: nn.Module) -> list[str]:
    """Return the names of parameters that an output's graph reaches without their rounding.

    Custom autograd Functions and TorchScript modules read parameters without a visible op.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: set[str] = set()
    ahead = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        for above, _ in node.next_functions:
            if above is None or above in seen:
                continue
            seen.add(above)
            if type(above).__name__ == "AccumulateGrad":
                found.add(names.get(id(getattr(above, "variable", None)), ""))
            elif above.name() != "_StraightThroughBackward":
                ahead.append(above)
    return sorted(found - {""})

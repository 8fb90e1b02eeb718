"""Where gradients enter the model and leave it: scaled on the way in, true on the way out."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from memtrain.kernels.floats.formats import FloatFormat
from memtrain.precision.state import PrecisionState


class Boundary:
    """Scales gradients at the model's outputs, takes the scale off at its weights and inputs.

    What reaches a parameter past the model (a penalty on the weights) never carries the scale. At
    the end of each backward pass through an output, overflows are counted: activations and weights
    may be promoted, the scale may change; under DistributedDataParallel, of all processes alike.

    Args:
        state: Is told of every pass.
    """

    def __init__(self, state: PrecisionState) -> None:
        self.state = state
        self.overflowed = False
        """Whether a gradient since the last step has overflowed: the step must be skipped."""
        self.group: Any = None
        """Of processes that train replicas of the model, and decide together."""
        self.device = torch.device("cpu")
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, tuple[Tensor, int]] = {}  # overflows and elements
        # 1 where a weight's gradient is not finite, and what takes the scale off
        self._found: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._given: list[Tensor] = []  # of gradients that came from outside: are they finite
        self._halved: list[Tensor] = []  # of operands of FP8 GEMMs: did they lose a bit
        self._scaled = False  # whether the gradients of the pass that runs carry the scale

    def __getstate__(self) -> dict[str, object]:
        return {"state": self.state, "overflowed": self.overflowed, "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.group = None
        self._clear()

    def count(self, name: str, overflows: Tensor, numel: int) -> None:
        """Of a tensor's elements so many overflowed in the forward."""
        before = self._counts.get(name)
        both = (before[0] + overflows, before[1] + numel) if before else (overflows, numel)
        self._counts[name] = both

    def note(self, halved: Tensor) -> None:
        """Whether an operand of an FP8 GEMM was halved."""
        self._halved.append(halved)

    def inside(self) -> bool:
        """Whether a forward runs that will be trained: no evaluation, no recomputation."""
        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def begin(self, model: nn.Module) -> None:
        """A forward that will be trained begins: look whether it is a replica's."""
        ddp = DistributedDataParallel._active_ddp_module
        self.group = None if ddp is None else ddp.process_group
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    # -- on the way in -----------------------------------------------------------------------

    def leave(self, output: Any) -> Any:
        """The model's output, whose gradient takes the scale when it comes.

        Nothing is done where no gradient will come, nor in a recomputation: there the gradients
        are scaled already.
        """
        if not self.inside():
            return output
        return tree_map(partial(self._out, {}), output)

    def _out(self, known: dict[int, Tensor], x: Any) -> Any:
        if isinstance(x, Tensor):
            if not x.requires_grad or not x.is_floating_point():
                return x
            if id(x) not in known:
                known[id(x)] = _Leave.apply(x, self)
            return known[id(x)]
        if is_dataclass(x) and not isinstance(x, type):
            for field in fields(x):
                inner = tree_map(partial(self._out, known), getattr(x, field.name))
                object.__setattr__(x, field.name, inner)
        return x

    def scaled(self, grad: Tensor) -> Tensor:
        """The gradient of an output, with the scale: a backward pass through the model begins."""
        if not self._scaled:
            self._scaled = True
            Variable._execution_engine.queue_callback(self._finish)
        if not self.state.scale.active:
            return grad
        self._given.append(grad.detach().isfinite().all())
        return grad * self.state.scale.value

    # -- on the way out ----------------------------------------------------------------------

    def enter(
        self, x: Tensor, name: str, rounded: Callable[[Tensor], Tensor], form: FloatFormat | None
    ) -> Tensor:
        """`x` rounded; its gradient is rounded to `form`, and loses the scale."""
        return _Enter.apply(x, name, rounded, form, self)

    def true(self, grad: Tensor, name: str, form: FloatFormat | None) -> Tensor:
        """The gradient of a weight or an input, rounded, without the scale."""
        grad = grad.clone() if form is None else self.round(grad, name, form)
        scale = self.state.scale
        if not scale.active or not self._scaled:
            return grad
        found = self._found.get(grad.device)
        if found is None:
            zero = torch.zeros((), device=grad.device)
            found = self._found[grad.device] = (zero, torch.full_like(zero, 1 / scale.value))
        torch._amp_foreach_non_finite_check_and_unscale_([grad], *found)
        return grad

    def round(self, grad: Tensor, name: str, form: FloatFormat) -> Tensor:
        """A gradient in its format.

        Raises:
            RuntimeError: Under `create_graph=True`: rounding has no derivative.
        """
        _only_once()
        return form.round(grad, seed=self.state.seed(f"gradient of {name}", form))

    # -- at the end of a backward pass -------------------------------------------------------

    def _finish(self) -> None:
        counts, found, given, halved = self._counts, self._found, self._given, self._halved
        self._clear()
        self.state.halved += sum(map(int, halved))
        overflows = torch.stack([one for one, _ in counts.values()]).tolist() if counts else []
        pairs = zip(counts.items(), overflows, strict=True)
        shares = {name: (count, numel) for (name, (_, numel)), count in pairs}
        overflow = any(bool(one) for one, _ in found.values())
        theirs = not all(bool(ok) for ok in given)
        if self.group is not None:
            overflow, theirs, shares = self._agree(overflow, theirs, shares)
        self.state.promote({name: count / numel for name, (count, numel) in shares.items()})
        if not self.state.scale.active:
            return
        # A loss that is not finite is the user's: no scale would mend it.
        overflow = overflow and not theirs
        self.overflowed |= overflow
        self.state.scale.update(overflow=overflow)

    def _agree(
        self, overflow: bool, theirs: bool, shares: Mapping[str, tuple[float, float]]
    ) -> tuple[bool, bool, dict[str, tuple[float, float]]]:
        """The same of all processes together, by one sum of a few numbers."""
        names = [value.name for value in self.state.graph.values] if self.state.graph else []
        own = [shares.get(name, (0, 0)) for name in names]
        numbers = [float(overflow), float(theirs), *(number for pair in own for number in pair)]
        table = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(table, group=self.group)
        anywhere, lost, *rest = table.tolist()
        pairs = zip(names, zip(rest[::2], rest[1::2], strict=True), strict=True)
        return anywhere > 0, lost > 0, {name: pair for name, pair in pairs if pair[1]}


def _only_once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "gradients that are rounded cannot be differentiated again (create_graph=True); "
            "allowed: precision.assignment=fp32"
        )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        name: str,
        rounded: Callable[[Tensor], Tensor],
        form: FloatFormat | None,
        boundary: Boundary,
    ) -> Tensor:
        ctx.site, ctx.form, ctx.boundary = name, form, boundary
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _only_once()
        return ctx.boundary.true(grads[0], ctx.site, ctx.form), None, None, None, None


class _Leave(torch.autograd.Function):
    """The same tensor for the user, who may change it in place as ever: not a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _only_once()
        return ctx.boundary.scaled(grads[0]), None

"""Rounds what the ops of a forward make and read, and what their backward gives."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.activations.saved.handles import check_version
from memtrain.activations.saved.pack import SavedTensors
from memtrain.compressors import Compressor, Float, Keep
from memtrain.kernels.floats.format_names import FORMATS
from memtrain.kernels.floats.formats import FloatFormat
from memtrain.precision import gemm
from memtrain.precision.boundary import Boundary
from memtrain.precision.ops import QUESTIONS, writes
from memtrain.precision.paths import Outliving, past_rounding, within
from memtrain.precision.state import PrecisionState
from memtrain.precision.values import Values, roundable


class Rounder:
    """A `Rounding`: formats are those of a `PrecisionState`.

    An op's result is rounded where it lies, so that a backward which uses the result uses the
    rounded one; its gradient, the sum over all who read it, by a hook on it. A weight is rounded
    when an op reads it; its gradient on the way back, where it also loses the loss scale.

    Args:
        state: Formats, counts and the loss scale.
        no_rule: The plan's choice for a saved tensor that no rule claims.
        trial: Whether this is a trace, of which nothing may stay.
    """

    def __init__(self, state: PrecisionState, no_rule: Keep, *, trial: bool = False) -> None:
        self.state, self.no_rule, self.trial = state, no_rule, trial
        self.boundary = Boundary(state)
        self.saved: SavedTensors | None = None
        self._plain: dict[str, str] = {}  # results of linear layers -> why not on FP8 GEMMs
        self._checked: set[str] = set()  # modules of which a whole forward has been looked at
        self._clear()

    def _clear(self) -> None:
        self._names = Values()
        self._rounded: dict[str, weakref.ref[Tensor]] = {}
        self._counts = False  # whether overflows count: in forwards that will be trained
        self._outliving: Outliving | None = None
        self._model: nn.Module | None = None

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_names", "_rounded", "_counts", "_outliving", "_model")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def attach(self, saved: SavedTensors) -> None:
        """Weights and rounded tensors that `saved` packs are kept exactly."""
        self.saved, saved.exact = saved, self.exact

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
        self._counts = self.boundary.inside() and not self.trial
        if self._counts:
            self.boundary.begin(model)
        if self._counts and module not in self._checked:
            self._outliving = Outliving()
        given = (args, kwargs)
        changed: dict[int, Tensor] = {}
        for made in self._names.inputs(module, given):
            changed[id(made.tensor)] = self._input(made.name, made.tensor)
        return tree_map_only(Tensor, lambda x: changed.get(id(x), x), given)

    def _input(self, name: str, x: Tensor) -> Tensor:
        known = self.state.knows(name)
        form = self.state.forward_format(name) if known else None
        back = self.state.backward_format(name) if known else None
        if self.boundary.inside():
            y = self.boundary.enter(x, name, partial(self._round, name, form), back)
        else:  # in a recomputation gradients pass on as they are
            y = x if form is None else self._round(name, form, x)
        if form is not None:
            self._names.own(y, name)
        return y

    def arguments(
        self, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Put rounded weights in the place of parameters."""
        self._names.before(args, kwargs)
        if name.strip("_") in QUESTIONS:
            return args, kwargs
        written = args[0] if args and writes(name, kwargs) else None
        named = {key: self._read(x, written) for key, x in kwargs.items()}
        return [self._read(x, written) for x in args], named

    def _read(self, x: Any, written: Any) -> Any:
        # No closure that calls itself: it would keep what is written alive until a collection.
        if type(x) in (list, tuple):
            return type(x)(self._read(item, written) for item in x)
        if not isinstance(x, Tensor) or x is written:
            return x
        parameter = self._names.parameter(x)
        return self._weight(x, parameter) if parameter and roundable(x) else x

    def _weight(self, x: Tensor, name: str) -> Tensor:
        known = self._rounded[name]() if name in self._rounded and x._base is None else None
        if known is not None:
            return known
        form = self.state.forward_format(name)
        back = self.state.gradient_format
        seed = self.state.seed(name, form, weight=True)
        y = self.boundary.enter(x, name, partial(self._round, name, form, seed=seed), back)
        if form is None:
            return y
        self._names.own(y, name)
        if x._base is None:
            self._rounded[name] = weakref.ref(y)
            if self.saved is not None and torch.is_grad_enabled():
                self.saved.remake(y, _Again(x, form, seed))
        return y

    def function(
        self, func: Any, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """An FP8 GEMM in place of a linear layer whose operands are low, where that is asked."""
        if not self.state.asked.fp8_gemm or self.trial or name != "linear":
            return func
        site, made = f"{module or '(root)'} / {name}", self._names.upcoming(module, name)
        if torch._C._current_graph_task_id() == -1:
            self._plain[made] = self._why_plain(*_linear(*args, **kwargs)[:2])
        # A recomputed part does not know its input's site: it does as the forward did.
        if why := self._plain.get(made, "not in the forward"):
            self.state.gemms[site] = why
            return func
        back = self.state.low_gradient(made)
        halved = self.boundary.note if self._counts else _ignore

        def run(*args: Any, **kwargs: Any) -> Tensor:
            self.state.gemms[site] = ""
            form = self.state.asked.low_format
            return gemm.linear(*_linear(*args, **kwargs), form, back, halved)

        return run

    def _why_plain(self, x: Tensor, weight: Tensor) -> str:
        named = (("input", x), ("weight", weight))
        high = [what for what, y in named if not self.state.is_low(self._names.name_of(y))]
        return f"high: {', '.join(high)}" if high else gemm.unfit(x, weight)

    def result(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Round what an op has made."""
        for name, y, _ in self._names.made(module, op, args, kwargs, result):
            if not self.state.knows(name):
                if not y.requires_grad:
                    self._names.forget(y)
                    continue
                self.state.unseen.setdefault(name)
            form, back = self.state.forward_format(name), self.state.backward_format(name)
            if form is None:
                self._names.forget(y)
            else:
                # Not in autograd's eyes: a softmax's saved result shall be the rounded one.
                seed = self.state.seed(name, form)
                self._count(name, form.round_count_(y.data, seed=seed), y.numel())
            if back is not None and y.requires_grad:
                y.register_hook(partial(self.boundary.round, name=name, form=back))
        if self._outliving is not None:
            self._outliving.note(f"{module or '(root)'} / {op}", result)
        return result

    def end(self, output: Any, *, whole: bool) -> Any:
        """Scale the gradients that will come in through the outputs."""
        outliving, model = self._outliving, self._model
        self._clear()
        if not whole or self.trial:
            return output
        if outliving is not None and model is not None:
            self._check(output, outliving, model)
        return self.boundary.leave(output)

    def _check(self, output: Any, outliving: Outliving, model: nn.Module) -> None:
        """Look once for gradients that would take another way than the loss scale's."""
        self._checked.add(self._module)
        if not self.state.scale.active:
            return
        past = past_rounding(within(output), model)
        if past:
            raise RuntimeError(
                f"{', '.join(past[:5])}: read where no op is seen (by a custom autograd Function "
                "or a TorchScript module), so that the loss scale would stay in the gradient; "
                "allowed: precision.loss_scale=none"
            )
        left = outliving.left(output)
        if left:
            warnings.warn(
                f"what {left[0]} gives ({len(left)} such) outlives the forward without being an "
                "output of the model: a loss term that uses it does not carry the loss scale. "
                "Return it from the forward, or set precision.loss_scale=none",
                stacklevel=2,
            )

    def exact(self, x: Tensor, chosen: Keep) -> Compressor | None:
        """Codes of the format that `x` has been rounded to, where no rule claims it."""
        name = self._names.name_of(x)
        form = self.state.forward_format(name) if name and chosen == self.no_rule else None
        return None if form is None else _codes(form)

    def _round(
        self, name: str, form: FloatFormat | None, x: Tensor, *, seed: int | None = None
    ) -> Tensor:
        if form is None:
            return x.detach()
        seed = self.state.seed(name, form) if seed is None else seed
        y, count = form.round_count(x, seed=seed)
        self._count(name, count, x.numel())
        return y

    def _count(self, name: str, overflows: Tensor, numel: int) -> None:
        if self._counts and self.state.asked.promotion is not None and self.state.is_low(name):
            self.boundary.count(name, overflows, numel)


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _ignore(halved: Tensor) -> None:
    pass


class _Again:
    """Rounds a parameter as the forward did, for the backward."""

    def __init__(self, parameter: Tensor, form: FloatFormat, seed: int) -> None:
        self.parameter, self.form, self.seed = parameter, form, seed
        self.version = parameter._version

    def __call__(self) -> Tensor:
        check_version(self.parameter, self.version)
        return self.form.round(self.parameter.detach(), seed=self.seed)


@lru_cache
def _codes(form: FloatFormat) -> Float:
    return Float(format=next((name for name, one in FORMATS.items() if one == form), form))

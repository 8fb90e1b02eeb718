"""Optimizers whose kernels decompress, step and compress all parameters at once."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.compressors.base import Compressor
from memtrain.kernels import cpu
from memtrain.kernels.dispatch import is_simulated
from memtrain.kernels.step.codecs import EXACT, Codec
from memtrain.kernels.step.groups import Inputs
from memtrain.kernels.step.prepared import PreparedStep, PreparedSteps
from memtrain.kernels.step.step import Entry, check_entry, has_kernel
from memtrain.kernels.step.update_rules import Scalars
from memtrain.optim.fused.payloads import (
    as_payload,
    codec_of,
    counter_dtype,
    moment_dtype,
    real_view,
    zeros,
)
from memtrain.optim.fused.step_tensors import tensors_of
from memtrain.optim.states import layout
from memtrain.optim.states.compressed_states import (
    CompressedStates,
    closure_loss,
    refuse_capture,
)
from memtrain.optim.states.optimizer_hooks import notify_schedulers
from memtrain.optim.states.per_parameter import group_of
from memtrain.optim.states.shards import USUAL, local, shard_of
from memtrain.optim.states.targets import (
    Part,
    Target,
    parts_of,
    refuse_meta,
    refuse_sparse,
    with_local_gradients,
)

Fused = TypeVar("Fused", bound="FusedStates")
_TITLES = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "momentum": "momentum value",
    "weight_decay": "weight_decay value",
}


class FusedStates(CompressedStates):
    """Base class of the fused optimizers: `step`, state creation and argument checks.

    A subclass sets `update_rule` (the kernel), `plain` (the equivalent torch optimizer) and `names`
    (the states), and implements `scalars`. `first` and `second` are the compressors of signed and
    of non-negative states. Parameters with at most `min_elements` elements keep float32 states.
    """

    separable: ClassVar[bool] = True
    update_rule: ClassVar[str]
    plain: ClassVar[type[Optimizer]]
    names: ClassVar[tuple[str, ...]] = ()
    first_default: ClassVar[str] = "B128/DE"
    second_default: ClassVar[str] = "Rank-1/Linear"
    bits: ClassVar[int] = 4
    counts: ClassVar[bool] = False
    """Whether each parameter's state has a counter of steps."""

    def __init_subclass__(cls) -> None:
        """Refuse names of states with an unknown sign, which decides the codebook."""
        for name in cls.names:
            if name not in (*layout.SIGNED, *layout.UNSIGNED):
                raise TypeError(f"state {name!r} of {cls.__name__} is in no list of states' signs")
        super().__init_subclass__()

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        first: str | None = None,
        second: str | None = None,
        min_elements: int = layout.MIN_ELEMENTS,
    ) -> None:
        if min_elements < 0:
            raise ValueError(f"min_elements must be at least 0, got {min_elements}")
        first, second = first or self.first_default, second or self.second_default
        self.choose = layout.Choice(first=first, second=second, bits=self.bits)
        self.min_elements = min_elements
        super().__init__(params, defaults)

    def scalars(self, group: dict[str, Any], count: float) -> Scalars:
        """Return the kernel's scalars for a group's step `count` (1 is a parameter's first)."""
        raise NotImplementedError

    @classmethod
    def codecs(cls, compressors: Sequence[Compressor]) -> tuple[Codec, ...] | None:
        """Return the kernel's codecs for the compressors of `names`, or None without a kernel."""
        found = []
        for name, compressor in zip(cls.names, compressors, strict=False):
            codec = codec_of(compressor, signed=not layout.is_unsigned(name))
            if codec is None:
                return None
            found.append(codec)
        return tuple(found) if has_kernel(cls.update_rule, found) else None

    def plain_class(self) -> type[Optimizer]:
        """Return the class of the equivalent plain optimizer."""
        return self.plain

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for options that are out of range or not supported."""
        super().check(group)
        if group.get("amsgrad"):
            raise ValueError(
                f"{type(self).__name__} has no amsgrad: its running maximum has no fused kernel; "
                "allowed: CompressedOptimizer around torch's"
            )
        check_numbers(group, self.defaults)

    @classmethod
    def state_names(cls, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the states that a parameter of a group has, without its step counter."""
        return cls.names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its options and the compressors of its states are checked."""
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            decided = [layout.decide(param, self.choose, n, self.min_elements) for n in self.names]
            compressors = [compressor for compressor, _ in decided]
            if self.codecs(compressors) is None:
                layout.refuse_fused_only(compressors, type(self).__name__)

    @torch.no_grad()
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return the closure's loss.

        Raises:
            RuntimeError: For sparse gradients, for parameters on the meta device, and while a CUDA
                graph is captured.
            ValueError: For options out of range, and states of another size or device. If `step`
                raises one of these errors, nothing has changed.
        """
        refuse_capture()
        loss = closure_loss(closure)
        self.step_parts(parts_of(self.param_groups))
        notify_schedulers(self)
        return loss

    def step_targets(self, targets: Sequence[Target]) -> None:
        """Update some parameters, each by the options of its group, as `step` does."""
        parts: dict[int, tuple[dict[str, Any], list[Target]]] = {}
        for target in targets:
            group = group_of(self, target.param, self.param_groups)
            parts.setdefault(id(group), (group, []))[1].append(target)
        self.step_parts([*parts.values()])

    def step_parts(self, parts: Sequence[Part]) -> None:
        """Update the parameters of some groups; nothing has changed if this raises."""
        local_parts = [(group, with_local_gradients(targets)) for group, targets in parts]
        found = self._step_tensors(local_parts)
        prepared = None if found is None else self._steps.find(found[0])
        for group, targets in local_parts:
            if prepared is None:
                refuse_sparse(targets, type(self).__name__)
                refuse_meta(targets, type(self).__name__)
            self.check(group)
        watched = self._stall.before(local_parts)
        if prepared is not None and found is not None:
            scalars = [one for part in local_parts for one in self._scalars(*part)]
            prepared.run(Inputs(scalars, *found[1]))
        else:
            self._prepare_and_step(local_parts)
        _increase_versions([target.param for _, targets in local_parts for target in targets])
        self._stall.after(watched)

    @cached_property
    def _steps(self) -> PreparedSteps:
        return PreparedSteps()

    def _step_tensors(self, parts: Sequence[Part]) -> Any:
        """Return `tensors_of` this step; None if a cached step cannot be used."""
        if is_simulated():
            return None
        return tensors_of(parts, [self.state_names(group) for group, _ in parts], self.state)

    def _prepare_and_step(self, parts: Sequence[Part]) -> None:
        """Build the kernel tables, run the step, and cache the tables."""
        self._check_states(parts)
        entries = [entry for part in parts for entry in self._entries(*part)]
        found = self._step_tensors(parts)
        prepared = PreparedStep(entries)
        prepared.run()
        if found is not None and prepared.lasting and len(entries) == len(found[1][0]):
            self._steps.keep(found[0], prepared)

    def _check_states(self, parts: Sequence[Part]) -> None:
        """Raise `ValueError` for states of another size or device, before anything changes."""
        for group, targets in () if is_simulated() else parts:
            names = self.state_names(group)
            for target in targets:
                state = self.state.get(target.param, {})
                if any(state.get(name) is None for name in names):
                    continue
                compressors, codecs = self._kept_as(target.param, names)
                if codecs is not None:
                    no_scalars: Any = ()
                    check_entry(self._entry(target, state, names, codecs, no_scalars))
                    continue
                for name, compressor in zip(names, compressors, strict=True):
                    if isinstance(state[name], dict):
                        layout.check_payload(target.param, name, state[name], compressor)

    def _entries(self, group: dict[str, Any], targets: Sequence[Target]) -> Iterator[Entry]:
        """Yield an entry per parameter; update those without a fused kernel at once."""
        names = self.state_names(group)
        for target, scalars in zip(targets, self._scalars(group, targets), strict=True):
            param = target.param
            state = self.state[param] if names else {}
            compressors, codecs = self._kept_as(param, names)
            for name, compressor in zip(names, compressors, strict=True):
                if state.get(name) is None:
                    state[name] = zeros(compressor, param)
            if codecs is None:
                self._step_whole(target, state, dict(zip(names, compressors, strict=True)), scalars)
            else:
                yield self._entry(target, state, names, codecs, scalars)

    def _entry(
        self,
        target: Target,
        state: dict[str, Any],
        names: tuple[str, ...],
        codecs: tuple[Codec, ...],
        scalars: Scalars,
    ) -> Entry:
        param, grad, guard, master = target
        payloads = tuple(as_payload(state[name]) for name in names)
        part, grad, shard = real_view(local(param)), real_view(grad), shard_of(param)
        return Entry(part, grad, payloads, codecs, self.update_rule, scalars, shard, master, guard)

    def _kept_as(
        self, param: Tensor, names: tuple[str, ...]
    ) -> tuple[list[Compressor], tuple[Codec, ...] | None]:
        """Return the compressors of a parameter's states and the kernels' codecs."""
        compressors = [self.compressor(param, name)[0] for name in names]
        return compressors, self.codecs(compressors)

    def _step_whole(
        self,
        target: Target,
        state: dict[str, Any],
        compressors: dict[str, Compressor],
        scalars: Scalars,
    ) -> None:
        """Update a parameter whose compressors have no fused kernel, with float32 states."""
        param, grad, guard, master = target
        if guard is not None and not guard.isfinite():
            return
        whole = {
            name: layout.unpack(compressor, state[name], param, moment_dtype(param))
            for name, compressor in compressors.items()
        }
        payloads = tuple({"tensor": local(x)} for x in whole.values())
        codecs = (EXACT,) * len(whole)
        entry = Entry(local(param), grad, payloads, codecs, self.update_rule, scalars, None, master)
        PreparedStep([entry]).run()
        state.update(self.packed(param, state, whole))

    def _counter(self, param: Tensor) -> Tensor:
        """Return a parameter's step counter, on the host."""
        state = self.state[param]
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor) or not step.is_cpu:
            dtype = step.dtype if isinstance(step, Tensor) else counter_dtype()
            step = state["step"] = torch.as_tensor(step, dtype=dtype, device="cpu")
        return step

    def _step_counts(self, params: Sequence[Tensor]) -> list[float]:
        """Increment and return the step counters; without counters 1, then 2."""
        if not self.counts:
            name = self.names[0]  # None in checkpoints of SGD without momentum
            kept = [self.state.get(param, {}).get(name) is not None for param in params]
            return [2.0 if one else 1.0 for one in kept]
        steps = [self._counter(param) for param in params]
        if is_simulated():  # it counts nothing
            return [1.0] * len(steps)
        if len(steps) > 1 and {x.dtype for x in steps} == {torch.float32} and cpu.library():
            addresses = torch.from_numpy(np.array([*map(Tensor.data_ptr, steps)]))
            counts = torch.empty(len(steps), dtype=torch.float32, device="cpu")
            cpu.call("mt_count_step", addresses, counts, len(counts))
            return counts.tolist()
        return [step.add_(1).item() for step in steps]

    def _scalars(self, group: dict[str, Any], targets: Sequence[Target]) -> list[Scalars]:
        """Return the scalars of each parameter's step, by the step counters."""
        counts = self._step_counts([target.param for target in targets])
        made = {count: self.scalars(group, count) for count in {*counts}}
        return [made[count] for count in counts]

    def check_saved(self, param: Tensor, values: dict[str, Any], group: dict[str, Any]) -> None:
        """As `CompressedStates.check_saved`."""
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.names, param.shape)
        layout.check_states(param, values, {**shapes, "step": ()} if self.counts else shapes)

    def load_plain(self, param: Tensor, name: str, value: Tensor) -> Any:
        """As `CompressedStates.load_plain`."""
        # The kernels read exact states as contiguous float32, whatever the checkpoint holds.
        return super().load_plain(param, name, value.to(moment_dtype(param)).contiguous())


def check_numbers(group: dict[str, Any], known: Container[str] = ("betas", *_TITLES)) -> None:
    """Raise torch's `ValueError` for negative or NaN options and betas outside [0, 1).

    Options that are not in `known` are not read: another optimizer's checkpoint has brought them.
    """
    for name, title in _TITLES.items():
        value = group.get(name, 0.0) if name in known else 0.0
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if not float(value) >= 0:
            raise ValueError(f"Invalid {title}: {value}; allowed: {name} of at least 0")
    for k, beta in enumerate(group.get("betas", ()) if "betas" in known else ()):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {k}: {beta}; allowed: [0, 1)")


def _increase_versions(params: list[Tensor]) -> None:
    """Increment the versions of updated parameters: kernels write through data pointers."""
    if not is_simulated():
        parts = [local(param) for param in params if type(param) not in USUAL]
        torch.autograd.graph.increment_version(params + parts)


def variant(base: type[Fused], name: str, summary: str, **attributes: Any) -> type[Fused]:
    """Return a subclass with another docstring and other class attributes, in the base's module."""
    namespace = {"__doc__": summary, "__module__": base.__module__, **attributes}
    return type(name, (base,), namespace)  # pyright: ignore[reportReturnType]

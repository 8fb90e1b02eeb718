"""Optimizers around an optimizer: its groups and states, and steps of some parameters only."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.states import checkpoint_options, optimizer_hooks
from memtrain.optim.states.checkpoint_options import KEY
from memtrain.optim.states.compressed import CompressedOptimizer
from memtrain.optim.states.compressed_states import (
    CompressedStates,
    refuse_methods,
    restore_methods,
)
from memtrain.optim.states.first_step import raw_step
from memtrain.optim.states.per_parameter import group_of, number_of
from memtrain.optim.states.plain_checkpoints import restore_dtypes, share_groups
from memtrain.optim.states.shards import in_zero
from memtrain.optim.states.targets import Target

T = TypeVar("T")
FORMAT = 1
"""The format of a wrapper's own values in a checkpoint's groups and states."""
_RUNTIME = ("step", "_zero_grad_profile_name", "_positions")  # what copies and pickles lack


class WeakRef(Generic[T]):
    """A weak reference that copies and pickles as an empty one."""

    def __init__(self, target: T | None = None) -> None:
        self._target = None if target is None else weakref.ref(target)

    def __call__(self) -> T | None:
        """The referent, if it still lives."""
        return None if self._target is None else self._target()

    def __getstate__(self) -> dict[str, Any]:
        return {"_target": None}


def allowed(targets: Iterable[Target]) -> list[Target]:
    """Return the targets that no guard forbids to step: the host waits for each guard."""
    ready = [t for t in targets if t.guard is None or t.guard.isfinite()]
    return [target._replace(guard=None) for target in ready]


def step_targets(
    optimizer: Optimizer,
    targets: Sequence[Target],
    masters: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> None:
    """Step some parameters of a plain or compressed optimizer, without its hooks.

    `masters` maps a parameter to a leaf that is stepped in its place, with its states.
    """
    if isinstance(optimizer, FusedStates):
        optimizer.step_targets(targets)
        return
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    gradients: list[tuple[Tensor, Tensor | None]] = []
    for param, grad, *_ in allowed(targets):
        group = group_of(optimizer, param, optimizer.param_groups)
        alone, _ = found.setdefault(id(group), ({**group, "params": []}, group))
        leaf = masters.get(param, param)
        alone["params"].append(leaf)
        if grad is not leaf.grad:
            gradients.append((leaf, leaf.grad))
            leaf.grad = grad.to(leaf.dtype)
    for param, leaf in masters.items():
        _move_states(optimizer, param, leaf)
    try:
        _step_groups(optimizer, [alone for alone, _ in found.values()])
    finally:
        for leaf, grad in gradients:
            leaf.grad = grad
        for param, leaf in masters.items():
            _move_states(optimizer, leaf, param)
    for alone, group in found.values():  # an option that a step advances
        group.update({k: alone[k] for k in alone.keys() - {"params", "param_names"}})


def _move_states(optimizer: Optimizer, source: Tensor, target: Tensor) -> None:
    if source in optimizer.state:
        optimizer.state[target] = optimizer.state.pop(source)


def _step_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    if isinstance(optimizer, CompressedOptimizer):
        optimizer.step_groups(groups)
        return
    whole, optimizer.param_groups = optimizer.param_groups, groups
    try:
        raw_step(optimizer)
    finally:
        optimizer.param_groups = whole


class OptimizerWrapper(Optimizer):
    """Base of optimizers around another optimizer, with the same groups, states and hooks.

    The optimizer inside refuses its own `step` until `release_inner`.
    """

    _looked = False
    copied_hooks: Any = None
    """As `CompressedStates.copied_hooks`."""

    def __init__(self, inner: Optimizer) -> None:
        if isinstance(inner, LBFGS):
            raise TypeError("LBFGS is refused: it needs all parameters and gradients at once")
        self.inner = inner
        self._inner_methods = refuse_methods(inner, ["step"])
        self._share()

    def _share(self) -> None:
        """Initialize torch's base class, without the groups and states of its `__init__`."""
        self.defaults = {}
        optimizer_hooks.share(self, self.inner)
        super().__setstate__({})
        self.defaults = self.inner.defaults

    def refuse_replaced(self, known: Iterable[Tensor]) -> None:
        """Raise at the first step or gradient if the groups lack a parameter in `known`."""
        if self._looked:
            return
        gone = set(known) - set(self.params())
        if in_zero(gone):
            raise RuntimeError(
                f"DeepSpeed's ZeRO joined {len(gone)} parameters to flat vectors after "
                f"{type(self).__name__} was made: split weights and released gradients need the "
                "parameters themselves; allowed: weights=keep and gradients=keep (the preset "
                "balanced), or FSDP2 in place of ZeRO"
            )
        if gone:
            raise RuntimeError(
                f"{len(gone)} parameters were replaced after {type(self).__name__} was made, as "
                "accelerate's prepare does under FSDP2: split weights and released gradients would "
                "be lost; allowed: memtrain.wrap after prepare, of a model that is bfloat16 before "
                "it, or weights=keep and gradients=keep"
            )
        self._looked = True

    def release_inner(self) -> Optimizer:
        """Detach and return the inner optimizer, which may step again."""
        restore_methods(self.inner, self._inner_methods)
        return self.inner

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's states."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.inner.param_groups = value

    def __getstate__(self) -> dict[str, Any]:
        values = {k: v for k, v in vars(self).items() if not k.startswith("_optimizer_")}
        return {k: v for k, v in values.items() if k not in _RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share()
        if self.copied_hooks is not None:
            self.copied_hooks.attach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the inner optimizer's checks and defaults."""
        self.inner.add_param_group(param_group)

    def params(self) -> Iterator[Tensor]:
        """Every parameter of every group."""
        for group in self.param_groups:
            yield from group["params"]

    def number(self, param: Tensor) -> int:
        """Return a parameter's position among the parameters of all groups."""
        return number_of(self, param, self.param_groups)

    def step_targets(self, targets: Sequence[Target]) -> None:
        """Step some parameters now."""
        if isinstance(self.inner, OptimizerWrapper):
            self.inner.step_targets(targets)
        else:
            step_targets(self.inner, targets)

    def advance(self) -> None:
        """Record the end of a step of the whole model."""
        if isinstance(self.inner, OptimizerWrapper):
            self.inner.advance()

    def wrapper_state(self) -> dict[str, Any]:
        """Return the wrapper's own counters, which a checkpoint has in each parameter group."""
        return {}

    def wrapper_tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the wrapper's own tensors per parameter, which a checkpoint has in the states."""
        return {}

    def check_wrapper_state(
        self, values: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Raise ValueError if `load_wrapper_state` could not load this."""

    def load_wrapper_state(
        self, values: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Restore the values of `wrapper_state` and `wrapper_tensors`, which are in `states`."""

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with the wrapper's values in groups and states.

        `torch.load(weights_only=True)` reads it; `torch.distributed.checkpoint` saves all of it.
        """
        return optimizer_hooks.saved(self, self.inner, self._whole_state_dict)

    def _whole_state_dict(self) -> dict[str, Any]:
        inner, tensors = self.inner.state_dict(), self.wrapper_tensors()
        states = dict(inner["state"])
        for index, param in enumerate(self.params()):
            if param in tensors:
                states[index] = {**states.get(index, {}), **tensors[param]}
        values = {**inner.get(KEY, {}), "format": FORMAT}
        return checkpoint_options.saved(
            {**inner, "state": states, KEY: values}, self.wrapper_state()
        )

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this wrapper, or of an optimizer without the wrapper.

        A value that does not fit raises `ValueError` before anything changes.
        """
        optimizer_hooks.loaded(self, self.inner, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        values = {**state_dict.get(KEY, {}), **checkpoint_options.found(state_dict)}
        if (number := values.get("format", FORMAT)) != FORMAT:
            raise ValueError(f"memtrain's state has format {number}; allowed: {FORMAT}")
        found = checkpoint_options.numbered(self.param_groups, state_dict)
        states = {param: state_dict["state"][number] for number, param, _ in found}
        self.check_wrapper_state(values, states)
        groups = self.inner.param_groups
        if not isinstance(self.inner, OptimizerWrapper):
            state_dict = checkpoint_options.without(state_dict)
        self.inner.load_state_dict(state_dict)
        if not isinstance(self.inner, OptimizerWrapper | CompressedStates):
            share_groups(self.inner, groups)
            restore_dtypes(self.inner, state_dict)
        self.load_wrapper_state(values, states)

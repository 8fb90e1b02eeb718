"""Optimizers around an optimizer: its groups and states, and steps of some parameters only."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.states import checkpoint_options, optimizer_hooks
from memtrain.optim.states.checkpoint_options import OWN
from memtrain.optim.states.compressed_states import CompressedStates, _refuse_step
from memtrain.optim.states.first_step import raw_step
from memtrain.optim.states.per_parameter import Numbers, PerParameter
from memtrain.optim.states.shards import in_zero

T = TypeVar("T")
FORMAT = 1
"""The format of a wrapper's own values in a checkpoint's groups and states."""


CHUNK = 2**22
"""Elements whose float32 masters exist at once; a larger parameter is stepped alone."""


_NOTHING = nullcontext()


class WeakRef(Generic[T]):
    """A weak reference that copies and pickles as an empty one."""

    def __init__(self, target: T | None = None) -> None:
        self._target = None if target is None else weakref.ref(target)

    def __call__(self) -> T | None:
        """The referent, if it still lives."""
        return None if self._target is None else self._target()

    def __getstate__(self) -> dict[str, Any]:
        return {"_target": None}


class Target(NamedTuple):
    """A parameter to step, and the leaf that the optimizer steps in its place."""

    param: Tensor
    leaf: Tensor
    """A leaf with `.grad`; the parameter itself, or its float32 master."""
    grad: Tensor | None = None
    """Used in place of `leaf.grad`; its dtype may differ where masters are stepped."""
    guard: Tensor | None = None
    """A scalar on the parameter's device: if it is not finite, nothing is stepped."""


def with_leaf(param: Tensor, value: Tensor, grad: Tensor, guard: Tensor | None = None) -> Target:
    """Return a target whose leaf replaces the parameter for one step.

    Args:
        param: The optimizer's parameter.
        value: The leaf's value, stepped in place.
        grad: The leaf's gradient, of the value's dtype and shape.
        guard: As in `Target`.

    Returns:
        An argument of `step_targets`.
    """
    leaf = nn.Parameter(value)
    leaf.grad = grad
    leaf._stands_for = getattr(param, "_stands_for", param)  # pyright: ignore[reportAttributeAccessIssue]
    return Target(param, leaf, None, guard)


def chunks(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in lists of at most `CHUNK` elements; a larger parameter is alone."""
    chunk: list[Tensor] = []
    held = 0
    for param in params:
        if chunk and held + param.numel() > CHUNK:
            yield chunk
            chunk, held = [], 0
        chunk.append(param)
        held += param.numel()
    if chunk:
        yield chunk


def step_targets(optimizer: Optimizer, targets: Sequence[Target]) -> None:
    """Step some of an optimizer's parameters; hooks are not called.

    Args:
        optimizer: A plain or compressed optimizer.
        targets: Parameters of its groups. Their gradients stay.
    """
    fused = isinstance(optimizer, FusedStates)
    if not fused:  # only fused kernels read guards
        targets = [t for t in targets if t.guard is None or t.guard.isfinite()]
    groups, whole = _groups_of(optimizer, targets), optimizer.param_groups
    masters = [target for target in targets if target.leaf is not target.param]
    for param, leaf, *_ in masters:
        if param in optimizer.state:
            optimizer.state[leaf] = optimizer.state.pop(param)
    gradients = [(t.leaf, t.leaf.grad) for t in targets if t.grad is not None]
    try:
        for target in targets:
            if target.grad is not None:
                target.leaf.grad = target.grad.to(target.leaf.dtype)
        optimizer.param_groups = [alone for alone, _ in groups]
        with _reading(optimizer, targets, not masters) if fused else _NOTHING:
            raw_step(optimizer)
    finally:
        optimizer.param_groups = whole
        for leaf, grad in gradients:
            leaf.grad = grad
        for param, leaf, *_ in masters:
            if leaf in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(leaf)
    for alone, group in groups if not fused else ():  # an option that a step advances
        group.update({k: alone[k] for k in alone.keys() - {"params", "param_names"}})


def _groups_of(
    optimizer: Optimizer, targets: Sequence[Target]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of a group with the targets' leaves only and the optimizer's group.

    The position of each parameter is cached: the time for released gradients stays linear in
    their number.
    """
    groups = optimizer.param_groups
    positions = optimizer.__dict__.setdefault("_positions", PerParameter[tuple[int, int]]())
    found: dict[int, list[tuple[int, Tensor]]] = {}
    for param, leaf, *_ in targets:
        place = positions.get(param)
        if place is None or not _stands_at(groups, place, param):
            for g, group in enumerate(groups):
                for k, each in enumerate(group["params"]):
                    positions[each] = g, k
            place = positions[param]
        found.setdefault(place[0], []).append((place[1], leaf))
    alone = []
    for g in sorted(found):
        leaves = [leaf for _, leaf in sorted(found[g], key=lambda one: one[0])]
        alone.append(({**groups[g], "params": leaves}, groups[g]))
    return alone


def _stands_at(groups: list[dict[str, Any]], place: tuple[int, int], param: Tensor) -> bool:
    g, k = place
    return g < len(groups) and k < len(groups[g]["params"]) and groups[g]["params"][k] is param


def _reading(optimizer: FusedStates, targets: Sequence[Target], lasts: bool) -> Any:
    """Return a context in which the optimizer's step reads guards.

    Args:
        optimizer: The optimizer.
        targets: The targets of the step.
        lasts: Whether the leaves stay alive after the step.
    """
    guards = {target.leaf: target.guard for target in targets if target.guard is not None}
    if lasts and not guards:
        return _NOTHING
    return optimizer.reading(guards=guards, keeps_steps=lasts)


class OptimizerWrapper(Optimizer):
    """Base of optimizers around another optimizer, with the same groups, states and hooks.

    Args:
        inner: The optimizer inside. It refuses its own `step` until `release_inner`.

    Raises:
        TypeError: If the optimizer cannot step some parameters at a time (LBFGS).
    """

    _looked = False
    copied_hooks: Any = None
    """As `CompressedStates.copied_hooks`."""

    def __init__(self, inner: Optimizer) -> None:
        if isinstance(inner, LBFGS):
            raise TypeError("LBFGS is refused: it needs all parameters and gradients at once")
        self.inner = inner
        super().__init__([{"params": g["params"]} for g in inner.param_groups], {})
        self._adopt()

    def _adopt(self) -> None:
        inner = self.inner
        self.defaults = inner.defaults
        optimizer_hooks.share(self, inner)
        self._inner_step = vars(inner).get("step")
        inner.step = _refuse_step  # pyright: ignore[reportAttributeAccessIssue]

    def refuse_replaced(self, known: Iterable[Tensor]) -> None:
        """Raise at the first step or gradient if parameters were replaced since `wrap`.

        Args:
            known: Parameters that have hooks or corrections.

        Raises:
            RuntimeError: If the groups lack one of them. Nothing has changed then.
        """
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
        vars(self.inner).pop("step", None)
        if self._inner_step is not None:
            self.inner.step = self._inner_step
        return self.inner

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's states."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        if "_inner_step" in vars(self):  # not inside Optimizer.__init__
            self.inner.state = value

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        if "_inner_step" in vars(self):
            self.inner.param_groups = value

    def __getstate__(self) -> dict[str, Any]:
        own = {k: v for k, v in vars(self).items() if not k.startswith("_optimizer_")}
        return {k: v for k, v in own.items() if k not in ("step", "_zero_grad_profile_name")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        optimizer_hooks.share(self, self.inner)
        super().__setstate__({})
        if self.copied_hooks is not None:
            self.copied_hooks.attach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the inner optimizer's checks and defaults."""
        if "_inner_step" in vars(self):
            self.inner.add_param_group(param_group)

    def params(self) -> Iterator[Tensor]:
        """Every parameter of every group."""
        for group in self.param_groups:
            yield from group["params"]

    def number(self, param: Tensor) -> int:
        """Return a parameter's position among the parameters of all groups."""
        return self.__dict__.setdefault("_numbers", Numbers()).of(param, self.params())

    def step_targets(self, targets: Sequence[Target]) -> None:
        """Step some parameters now."""
        inner = self.inner
        inner.step_targets(targets) if isinstance(inner, OptimizerWrapper) else step_targets(
            inner, targets
        )

    def advance(self) -> None:
        """Record the end of a step of the whole model."""
        if isinstance(self.inner, OptimizerWrapper):
            self.inner.advance()

    def notify_schedulers(self) -> None:
        """Mark the optimizers inside as stepped: otherwise schedulers made for them warn."""
        for inner in optimizer_hooks.chain(self.inner):
            inner._opt_called = True

    def own_state(self) -> dict[str, Any]:
        """Return the wrapper's own counters, which a checkpoint has in each parameter group."""
        return {}

    def own_tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the wrapper's own tensors per parameter, which a checkpoint has in the states."""
        return {}

    def check_own_state(
        self, own: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Raise ValueError if `load_own_state` could not load this."""

    def load_own_state(
        self, own: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Restore the values of `own_state` and `own_tensors`, which are in `states`."""

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict, with the wrapper's own values in it.

        They are in the groups and states: `torch.distributed.checkpoint` drops other keys.

        Returns:
            Plain dicts of plain tensors and numbers: `torch.load(weights_only=True)` reads them.
        """
        return optimizer_hooks.saved(self, self.inner, self._whole_state_dict)

    def _whole_state_dict(self) -> dict[str, Any]:
        inner, tensors = self.inner.state_dict(), self.own_tensors()
        states = dict(inner["state"])
        for index, param in enumerate(self.params()):
            if param in tensors:
                states[index] = {**states.get(index, {}), **tensors[param]}
        own = {**inner.get(OWN, {}), "format": FORMAT}
        return checkpoint_options.saved({**inner, "state": states, OWN: own}, self.own_state())

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this wrapper, or of an optimizer without the wrapper.

        Args:
            state_dict: A checkpoint; without `"memtrain"`, the wrapper's own state starts anew.

        Raises:
            ValueError: If a value does not fit. Nothing has changed then.
        """
        optimizer_hooks.loaded(self, self.inner, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        own = {**state_dict.get(OWN, {}), **checkpoint_options.found(state_dict)}
        if (number := own.get("format", FORMAT)) != FORMAT:
            raise ValueError(f"memtrain's state has format {number}; allowed: {FORMAT}")
        states = _by_parameter(self.param_groups, state_dict)
        self.check_own_state(own, states)
        groups = self.inner.param_groups
        if not isinstance(self.inner, OptimizerWrapper):
            state_dict = checkpoint_options.without(state_dict)
        self.inner.load_state_dict(state_dict)
        if not isinstance(self.inner, OptimizerWrapper | CompressedStates):
            _share_groups(self.inner, groups)
            _restore_dtypes(self.inner, state_dict)
        self.load_own_state(own, states)


def _by_parameter(
    groups: list[dict[str, Any]], state_dict: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Map each parameter to its states in a checkpoint, by the position in its group."""
    found = {}
    for saved, group in zip(state_dict["param_groups"], groups, strict=False):
        for number, param in zip(saved["params"], group["params"], strict=False):
            found[param] = state_dict["state"].get(number, {})
    return found


def _share_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    # Optimizer.load_state_dict makes new dicts: put their values into those that others hold.
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        old.clear()
        old.update(new)
    optimizer.param_groups = groups


def _restore_dtypes(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    # Optimizer.load_state_dict casts states to the parameter's dtype: float32 moments to bfloat16.
    for saved, group in zip(loaded["param_groups"], optimizer.param_groups, strict=True):
        for index, param in zip(saved["params"], group["params"], strict=True):
            for name, value in loaded["state"].get(index, {}).items():
                own = optimizer.state[param].get(name)
                if isinstance(value, Tensor) and isinstance(own, Tensor):
                    own_device = own.device
                    optimizer.state[param][name] = value.detach().to(own_device, copy=True)

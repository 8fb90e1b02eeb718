"""Compressed states for any torch optimizer: decompress, let it step, compress."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from memtrain.compressors.base import Compressor
from memtrain.kernels.dispatch import is_for_cuda, is_simulated
from memtrain.optim.states import layout
from memtrain.optim.states.compressed_states import (
    CompressedStates,
    closure_loss,
    on_each,
    refuse_capture,
)
from memtrain.optim.states.first_step import (
    first_shapes,
    gradient_dtype,
    raw_step,
)
from memtrain.optim.states.known_optimizers import default_choice, is_separable, is_tested
from memtrain.optim.states.optimizer_hooks import notify_schedulers
from memtrain.optim.states.shards import shard_of
from memtrain.optim.states.targets import parts_of, refuse_sparse

_ZERO_IN_HALF = 2.0**-25
"""The greatest number that float16 rounds to 0."""


def _of_no_parameter(optimizer: Optimizer) -> dict[Any, Any]:
    """Return an optimizer's own states, as MADGRAD's counter."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


class CompressedOptimizer(CompressedStates):
    """Runs any torch optimizer with its per-parameter states compressed between steps.

    For each parameter, the states are decompressed, the optimizer steps that parameter, and the
    states are compressed. An optimizer that is not known to be separable steps all parameters at
    once. A state is compressed if it is a float tensor of the parameter's shape with more than
    `min_elements` elements and `choose` does not return `Identity`. With `Identity` for all states
    the run is bit-identical to the plain optimizer's.

    Args:
        optimizer: A torch optimizer, at any step of a run. Its parameter groups are shared; its
            states move here.
        choose: `(parameter, state name) -> compressor`; by default the paper's (`layout.Choice`)
            for optimizers that memtrain knows, none for others.
        min_elements: States with at most this many elements are kept.

    Raises:
        TypeError: For LBFGS, and for an optimizer with compressed states.
        ValueError: If it is differentiable: compressed states have no gradient.

    Memory:
        The payloads; during a step one parameter's states, or all parameters' states if the
        optimizer is not known to be separable.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(100, 100))
        >>> optimizer = CompressedOptimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> sorted(optimizer.state[weight]["momentum_buffer"])
        ['codes', 'scale']

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, algorithm 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        choose: layout.Choose | None = None,
        *,
        min_elements: int = layout.MIN_ELEMENTS,
    ) -> None:
        refuse(optimizer)
        for group in optimizer.param_groups:
            self.check(group)
        self.choose = choose or default_choice(optimizer)
        self.min_elements = min_elements
        for group in optimizer.param_groups:
            self._refuse_fused_only(optimizer, group)
        self.state, self.defaults = defaultdict(dict), {}
        self.param_groups = optimizer.param_groups
        super().__setstate__({})  # torch's `__init__`, which would add the groups again, is not run
        params = [p for p, _, _ in on_each(optimizer.param_groups)]
        # In the groups' order: compressing a part of a state is collective.
        moved = {p: self._packed(p, optimizer.state[p]) for p in params if p in optimizer.state}
        shared = {key: state for key, state in optimizer.state.items() if key not in moved}
        self.adopt(optimizer)
        optimizer.state.update(shared)  # of no parameter: the optimizer's own
        self.state.update(moved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the inner optimizer's checks and defaults."""
        inner = _inner(self)
        if not isinstance(param_group["params"], Tensor | set):  # as torch, before it is read twice
            param_group["params"] = list(param_group["params"])
        self.check({**self.defaults, **param_group})
        self._refuse_fused_only(inner, {**self.defaults, **param_group})
        inner.add_param_group(param_group)
        for param in inner.param_groups[-1]["params"]:
            if param in inner.state:
                self.state[param] = self._packed(param, inner.state.pop(param))

    def _refuse_fused_only(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Raise if a state that the optimizer will create has a compressor of fused steps."""
        params = group["params"]
        for param in [params] if isinstance(params, Tensor) else params:
            chosen = self.choose(param, "exp_avg") if isinstance(param, Tensor) else None
            if isinstance(chosen, Compressor) and chosen.fused_only:
                used, _ = layout.decide(param, self.choose, "exp_avg", self.min_elements)
                if "exp_avg" in first_shapes(optimizer, param, group):
                    layout.refuse_fused_only([used], f"compressed {type(optimizer).__name__}")

    @torch.no_grad()
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the inner optimizer, parameter by parameter; return the closure's loss.

        Raises:
            RuntimeError: For sparse gradients, and while a CUDA graph is captured.
            ValueError: For a group that is differentiable, that torch's fused SGD would step
                wrongly, or whose `eps` is 0 in float16, and for a parameter whose size changed. If
                `step` raises one of these errors, nothing has changed.
        """
        refuse_capture()
        loss = self.step_groups(self.param_groups, closure)
        notify_schedulers(self)
        return loss

    def step_groups(
        self, groups: list[dict[str, Any]], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Step groups that have some of the parameters, or leaves in their place."""
        separable = is_separable(self)
        loss = closure_loss(closure) if separable else None
        parts = parts_of(groups)
        inner = _inner(self)
        for group, targets in parts:
            refuse_sparse(targets, type(self).__name__)
            self.check(group)
            _refuse_broken(inner, group)
            _refuse_no_eps(inner, group)
            self.check_sizes(group)
        watched = self._stall.before(parts)
        if not separable:
            with self._states_in(inner, groups):
                loss = raw_step(inner, *([] if closure is None else [closure]))
        for group, targets in parts if separable else []:
            # Each parameter starts from the options as they are now: an option that a step
            # advances (a counter, a running sum) moves once, not once per parameter.
            options = dict(group)
            for target in targets:
                alone = {**options, "params": [target.param]}
                with self._states_in(inner, [alone]):
                    raw_step(inner)
                group.update({k: alone[k] for k in alone.keys() - {"params", "param_names"}})
        self._stall.after(watched)
        return loss

    def _whole_state_dict(self) -> dict[str, Any]:
        saved = super()._whole_state_dict()
        saved["state"].update(_of_no_parameter(_inner(self)))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the base class; what belongs to no parameter goes to the inner optimizer."""
        super().load_state_dict(state_dict)
        inner, loaded = _inner(self), _of_no_parameter(self)
        for name in _of_no_parameter(inner):
            del inner.state[name]
        for name in loaded:
            inner.state[name] = self.state.pop(name)

    def check_sizes(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` if the states of a parameter with a gradient have another size."""
        for param in () if is_simulated() else group["params"]:
            values = self.state.get(param) if param.grad is not None else None
            for name, value in (values or {}).items():
                if self.is_payload(param, name, value):
                    layout.check_payload(param, name, value, self.compressor(param, name)[0])
            if values:
                self.check_saved(param, values, group)

    def check_saved(self, param: Tensor, values: dict[str, Any], group: dict[str, Any]) -> None:
        """Raise `ValueError` for a state of another name or shape than those of a plain step."""
        first = self._first_shapes(param, group) if is_tested(_inner(self)) else {}
        if first:
            layout.check_states(param, values, {name: shape for name, (shape, _) in first.items()})

    @contextmanager
    def _states_in(
        self, inner: Optimizer, groups: list[dict[str, Any]], *, steps: bool = True
    ) -> Iterator[None]:
        """Give the inner optimizer these groups and their states; compress the changed states."""
        kept, inner.param_groups = inner.param_groups, groups
        before: dict[Tensor, dict[str, tuple[Any, Any]]] = {}
        for param, group, _ in on_each(groups):
            known = self._known(param, group) if param in self.state else {}
            before[param] = {k: (v, getattr(v, "_version", None)) for k, v in known.items()}
            if known:
                inner.state[param] = known
        try:
            yield
            for param in before:
                state, old = inner.state.get(param, {}), before[param]
                same = state.keys() == old.keys() and all(
                    value is old[name][0] and getattr(value, "_version", None) == old[name][1]
                    for name, value in state.items()
                )
                # Rounding an unchanged state again would add up. A kernel may write without a new
                # version, as torch's fused SGD does: a step with a gradient changes states.
                # Compressing a part is collective, and an empty part cannot show a change.
                stepped = steps and param.grad is not None
                if same and not stepped and shard_of(param) is None:
                    continue
                self.state[param] = self._packed(param, state)
        finally:
            inner.param_groups = kept
            for param in before:
                inner.state.pop(param, None)

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of an inner optimizer that has them, as schedule-free ones do."""
        if name not in ("train", "eval"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = getattr(_inner(self), name)

        @torch.no_grad()
        def with_states(*args: Any, **kwargs: Any) -> Any:
            with self._states_in(_inner(self), self.param_groups, steps=False):
                return method(*args, **kwargs)

        return with_states

    def _known(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return `unpacked` in the dtypes of the inner optimizer's own states of this parameter.

        Other dtypes come from checkpoints of other models, from float32 masters, and from gradients
        of another dtype (`grad_dtype`).
        """
        states, others = self.unpacked(param), gradient_dtype(param) != param.dtype
        for name, value in states.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or name == "step":
                continue
            if others or value.dtype != param.dtype:
                first = self._first_shapes(param, group)
                states[name] = value.to(first[name][1]) if name in first else value
        return states

    def _first_shapes(self, param: Tensor, group: dict[str, Any]) -> Any:
        """Return `first_shapes` of the inner optimizer, cached."""
        known = self.__dict__.setdefault("_known_shapes", {})
        # Options that are 0, False or None switch states off.
        switches = [
            name for name, x in group.items() if name != "params" and (isinstance(x, Tensor) or x)
        ]
        key = param.shape, param.dtype, gradient_dtype(param), *switches
        if key not in known:
            known[key] = first_shapes(_inner(self), param, group)
        return known[key]

    def _packed(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        whole = {k: x for k, x in state.items() if not layout.eligible(param, x, self.min_elements)}
        payloads = self.packed(param, state, whole)
        return {**state, **payloads}

    def _restore_dtypes(self, loaded: dict[str, Any]) -> None:
        super()._restore_dtypes(loaded)
        # As the inner class converts older checkpoints: missing options, numeric steps.
        inner = _inner(self)
        inner.__setstate__({"state": self.state, "param_groups": self.param_groups})
        inner.state = defaultdict(dict)


def _refuse_broken(inner: Optimizer, group: dict[str, Any]) -> None:
    """Raise for steps of torch's fused SGD that read uninitialized memory (torch 2.13)."""
    if not (isinstance(inner, SGD) and group["fused"] and group["momentum"]):
        return
    for param in group["params"]:
        halves = param.grad is not None and param.dtype in (torch.bfloat16, torch.half)
        if halves and param.is_cpu and not is_for_cuda(param):
            raise ValueError(
                f"torch's SGD(fused=True) with momentum gives a {param.dtype} parameter on a CPU "
                "random numbers; allowed there: fused=False"
            )


def _refuse_no_eps(inner: Optimizer, group: dict[str, Any]) -> None:
    """Raise if torch's own step divides by a root plus an `eps` that is 0 in float16.

    The second moment of gradients of 1e-4 is 0 there: updates would be Inf or NaN, silently.
    """
    eps, halves = group.get("eps"), type(inner).__module__.startswith("torch.optim.")
    if not halves or group.get("fused") or not isinstance(eps, float):
        return  # fused kernels compute in float32, and so do others' optimizers, mostly
    if 0 < eps <= _ZERO_IN_HALF and any(
        param.grad is not None and param.dtype == torch.half for param in group["params"]
    ):
        raise ValueError(
            f"{type(inner).__name__} steps a torch.float16 parameter in float16, where its "
            f"eps={eps} is 0 and updates may be infinite; allowed: eps=1e-07 or more, or "
            "float32 weights (SplitWeights converts them to float16 with a correction)"
        )


def refuse(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot have compressed states."""
    if isinstance(optimizer, CompressedStates):
        raise TypeError(
            f"{type(optimizer).__name__} has compressed states already; allowed: an optimizer "
            "of torch.optim, or optim=none, which does not compress states"
        )
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS cannot have compressed states: its history is one vector over all parameters, "
            "and its line search calls the closure many times a step; allowed: the preset "
            "activations_only, which does not compress states"
        )


def _inner(optimizer: CompressedStates) -> Optimizer:
    if optimizer.original is None:
        raise RuntimeError("this optimizer was restored: use the original one")
    return optimizer.original

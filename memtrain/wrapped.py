"""State of a wrapped model, and functions that read it."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.activations.adaptive.actnn import ActnnSensitivity
from memtrain.activations.adaptive.gact import GactAdapter
from memtrain.activations.intercept.hooks import Interception
from memtrain.environment import is_called_from
from memtrain.optim.states import checkpoint_options
from memtrain.optim.states.compressed_states import CompressedStates
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.wrappers.apply import KEEP, masters_of
from memtrain.optim.wrappers.wrapper import OptimizerWrapper, WeakRef
from memtrain.plan.plan import Plan
from memtrain.precision.state import PrecisionState

_AVERAGING = ("torch.optim.swa_utils", "timm.utils.model_ema")
ATTRIBUTE = "_memtrain"
"""Name of the model's attribute with its `Wrapped` state."""


@dataclass
class Wrapped:
    """State of a wrapped model: its plan, its interception and the handles of all hooks."""

    plan: Plan
    interception: Interception | None
    handles: list[Any]
    """Handles of all hooks, with one `StateDictHooks` per optimizer."""
    _optimizers: Sequence[Optimizer] = ()

    def optimizers(self) -> list[Optimizer | None]:
        """Return the optimizers that `wrap` returned; None for a deleted one."""
        return [one.optimizer() for one in self.handles if isinstance(one, StateDictHooks)]

    def keep_alive(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep optimizers alive with the model; copies of the model alone have none."""
        self._optimizers = optimizers

    def __getstate__(self) -> dict[str, Any]:
        weights = self.plan.config.weights
        if weights != KEEP and any(map(is_called_from, _AVERAGING)):
            warnings.warn(
                f"an average of a model with weights={weights!r} is in 16 bits, where most of its "
                "small steps are lost; allowed: an average that is made before memtrain.wrap and "
                "follows memtrain.fp32_state_dict(model) (docs/guides/weights.md), or weights=keep",
                RuntimeWarning,
                stacklevel=2,
            )
        return {**vars(self), "_optimizers": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for handle in self.handles:
            if isinstance(handle, StateDictHooks):
                handle.wrapped = WeakRef[Wrapped](self)


def module_list_of(model: nn.Module | Sequence[nn.Module], optimizers: Iterable[Any]) -> nn.Module:
    """Return the `ModuleList` that `wrap` made of a list of models; a module as it is.

    Args:
        model: The model, or the list of models, that was passed to `wrap`.
        optimizers: The optimizers that `wrap` returned.

    Raises:
        ValueError: If the list was not wrapped with these optimizers.
    """
    if isinstance(model, nn.Module):
        return model
    for optimizer in optimizers:
        found = vars(optimizer).get("_models")
        if found is not None and [*found] == [*model]:
            return found
    raise ValueError(f"this list of {len(model)} models is not wrapped with these optimizers")


def is_wrapped_with(model: nn.Module, optimizer: Any) -> bool:
    """Return whether `wrap` returned this optimizer with the model, or with one of its modules.

    Args:
        model: Any model.
        optimizer: Any optimizer; for accelerate's wrapper, the optimizer inside.

    Example:
        >>> import memtrain, torch
        >>> model = torch.nn.Linear(4, 4)
        >>> model, optimizer = memtrain.wrap(model, torch.optim.SGD(model.parameters()))
        >>> is_wrapped_with(model, optimizer)
        True
    """
    optimizer = inner_optimizer(optimizer)
    found = (getattr(module, ATTRIBUTE, None) for module in model.modules())
    return any(one is optimizer for wrapped in found if wrapped for one in wrapped.optimizers())


def wrapped_of(model: nn.Module) -> Wrapped:
    """Return the state of a wrapped model.

    Raises:
        ValueError: If the model is not wrapped.
    """
    wrapped = getattr(model, ATTRIBUTE, None)
    if wrapped is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped by memtrain")
    return wrapped


def plan_of(model: nn.Module) -> Plan:
    """Return the plan of a wrapped model.

    Args:
        model: A model that `wrap` returned.

    Returns:
        The plan, which `print` shows. `plan.listing()` has all sites after the first forward.

    Raises:
        ValueError: If the model is not wrapped.

    Example:
        >>> import memtrain, torch
        >>> model = torch.nn.Linear(64, 128)
        >>> model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> plan_of(model).config.gradients
        'keep'
    """
    return wrapped_of(model).plan


class StateDictHooks:
    """Hooks that save and load `state_dict(model)` with the optimizer's `state_dict`.

    The model and memtrain's optimizers refer to this object, so copies of both share one copy. This
    object keeps neither alive.

    Args:
        wrapped: The state of the wrapped model.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = WeakRef(wrapped)
        self.optimizer = WeakRef[Optimizer]()
        self._loaded: Mapping[str, Any] = {}
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handles": []}

    def attach(self, optimizer: Optimizer) -> Self:
        """Register the hooks on the optimizer that `wrap` returns.

        Returns:
            This object, whose `remove` removes the hooks.
        """
        self.optimizer = WeakRef(optimizer)
        self._handles = [
            optimizer.register_state_dict_post_hook(self._add_state),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]
        if isinstance(optimizer, CompressedStates | OptimizerWrapper):
            optimizer.copied_hooks = self
        return self

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _add_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        wrapped = self.wrapped()
        if wrapped is None or wrapped.interception is None:
            return saved
        return checkpoint_options.saved(saved, {"model": _state(wrapped)})

    def _before_load(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        self._loaded = checkpoint_options.found(loaded).get("model", {})
        is_wrapper = isinstance(optimizer, OptimizerWrapper)
        return loaded if is_wrapper else checkpoint_options.without(loaded)

    def _load(self, optimizer: Optimizer) -> None:
        wrapped, loaded = self.wrapped(), self._loaded
        self._loaded = {}
        if wrapped is not None and loaded:
            current = _state(wrapped)  # the checkpoint may be of another config: what both have
            _load(wrapped, {name: loaded.get(name, current[name]) for name in current})


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return memtrain's state for a checkpoint: counters, automatic bits, precision.

    `optimizer.state_dict()` contains this state. Call this function if the optimizer is not saved.

    Args:
        model: A model that `wrap` returned.

    Returns:
        `step`: the number of forward passes so far, part of the keys of stochastic rounding.
        `bits`: with `bits: auto`, the current widths and statistics. `precision`: the assignment,
        promotions and loss scale. A run that loads them continues bit for bit.

    Raises:
        ValueError: If the model is not wrapped.

    Example:
        >>> import memtrain, torch
        >>> model = torch.nn.Linear(64, 128)
        >>> model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> memtrain.load_state_dict(model, {"step": 7})
        >>> memtrain.state_dict(model)
        {'step': 7}
    """
    return _state(wrapped_of(model))


def _state(wrapped: Wrapped) -> dict[str, Any]:
    state: dict[str, Any] = {"step": wrapped.interception.saved.step if wrapped.interception else 0}
    if wrapped.plan.precision is not None:
        state["precision"] = wrapped.plan.precision.state_dict()
    if wrapped.plan.bits is not None and wrapped.interception is not None:
        watch = _actnn_sensitivity(wrapped.interception)
        if watch is not None:
            watch.flush()
        state["bits"] = wrapped.plan.bits.state_dict()
    return state


def load_state_dict(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Load a state that `memtrain.state_dict` returned (its example shows both functions).

    Args:
        model: A model that `wrap` returned.
        state_dict: The state of the resumed run.

    Raises:
        ValueError: If the model is not wrapped, or if the keys differ from those of the model's
            state.
    """
    _load(wrapped_of(model), state_dict)


def _load(wrapped: Wrapped, state_dict: dict[str, Any]) -> None:
    bits, interception = wrapped.plan.bits, wrapped.interception
    keys = {"step"} if bits is None else {"step", "bits"}
    if wrapped.plan.precision is not None:
        keys.add("precision")
    if set(state_dict) != keys:
        named = "the key 'step'" if len(keys) == 1 else f"the keys {sorted(keys)}"
        raise ValueError(f"memtrain's state has {named}, not {sorted(state_dict)}")
    if interception is None:
        return
    if wrapped.plan.precision is not None:
        wrapped.plan.precision.load_state_dict(state_dict["precision"])
    interception.saved.step = int(state_dict["step"])
    if bits is not None:
        bits.load_state_dict(state_dict["bits"])
        interception.record_next()
    watch = _actnn_sensitivity(interception)
    if watch is not None:
        watch.reset()


def precision_state(model: nn.Module) -> PrecisionState:
    """Return the state of a precision run: low tensors, promotions, ratio and loss scale.

    Args:
        model: A model that `wrap` returned, with a `precision` in its config.

    Returns:
        The live state of the run, which `print` shows.

    Raises:
        ValueError: If the model is not wrapped, or its config rounds no tensor.

    Example:
        >>> import torch
        >>> from memtrain import wrap
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        >>> cfg = ["activations=none", "optim=none", "precision=size_ordered"]
        >>> model, _ = wrap(model, torch.optim.SGD(model.parameters()), cfg)
        >>> model(torch.randn(32, 64)).square().mean().backward()
        >>> round(precision_state(model).ratio, 3)
        0.37
    """
    state = wrapped_of(model).plan.precision
    if state is None:
        raise ValueError("nothing is rounded: the config has precision.assignment=fp32")
    return state


def adapter(model: nn.Module) -> GactAdapter:
    """Return the object that adapts bit widths, for `bits: auto` with `sensitivity=passes`.

    Args:
        model: A model that `wrap` returned.

    Returns:
        An object whose `step(closure)` you call once per training step.

    Raises:
        ValueError: If the model is not wrapped, or if no rule has automatic bits.

    Example:
        >>> import torch
        >>> from memtrain import wrap
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        >>> model, _ = wrap(model, torch.optim.SGD(model.parameters()), "gact4")
        >>> x = torch.randn(32, 64)
        >>> adapter(model).step(lambda: model(x).square().mean().backward())
        True
    """
    wrapped = wrapped_of(model)
    bits, interception = wrapped.plan.bits, wrapped.interception
    if bits is None or interception is None:
        raise ValueError("no rule has bits='auto': there is nothing to adapt")
    return GactAdapter(interception, bits, interval=wrapped.plan.config.activations.adapt_interval)


def _actnn_sensitivity(interception: Interception) -> ActnnSensitivity | None:
    watch = interception.saved.watch
    return watch if isinstance(watch, ActnnSensitivity) else None


def fp32_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's `state_dict` in float32, with the master weights of split weights.

    Args:
        model: A model that `wrap` returned.

    Returns:
        The keys of `model.state_dict()`, with float32 parameters and unchanged buffers.

    Raises:
        ValueError: If the model is not wrapped, or is a copy without its optimizer.

    Memory:
        4 bytes per split parameter; float32 parameters are shared with the model.

    Example:
        >>> import memtrain, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> torch.nn.init.constant_(model.weight, 0.1)
        Parameter containing: tensor([[0.1000]], requires_grad=True)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> model, optimizer = memtrain.wrap(model, optimizer, {"weights": "bf16+16"})
        >>> model.weight.item(), fp32_state_dict(model)["weight"].item()
        (0.10009765625, 0.10000000149011612)
    """
    masters, found = _master_owners(model), {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.is_floating_point():
            owner = masters.get(value)
            found[name] = owner.master(value) if owner else value.detach().float()
        else:
            found[name] = value.detach() if isinstance(value, Tensor) else value
    return found


def load_fp32_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load a float32 `state_dict` into a model whose weights may be split.

    Args:
        model: A model that `wrap` returned.
        state_dict: The result of `fp32_state_dict`, or of the unwrapped model's `state_dict`.

    Raises:
        ValueError: If the model is not wrapped, or if keys or shapes differ. The model is
            unchanged.

    Example:
        >>> import memtrain, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> model, optimizer = memtrain.wrap(model, optimizer, {"weights": "bf16+16"})
        >>> load_fp32_state_dict(model, {"weight": torch.tensor([[0.1]])})
        >>> fp32_state_dict(model)["weight"].item()
        0.10000000149011612
    """
    masters = _master_owners(model)
    current = model.state_dict(keep_vars=True)
    if current.keys() != state_dict.keys():
        wrong = sorted(current.keys() ^ state_dict.keys())[:5]
        raise ValueError(f"the state dict's keys differ from the model's: {', '.join(wrong)} ...")
    for name, value in current.items():
        if isinstance(value, Tensor) and value.shape != state_dict[name].shape:
            shapes = f"{tuple(state_dict[name].shape)}, not {tuple(value.shape)}"
            raise ValueError(f"{name} has shape {shapes}")
    model.load_state_dict(dict(state_dict))
    for name, value in current.items():
        if isinstance(value, nn.Parameter) and value in masters:
            masters[value].set_master(value, state_dict[name])


def _master_owners(model: nn.Module) -> dict[Tensor, Any]:
    """Parameter -> the optimizer's part that knows its float32 master; empty if none is split."""
    wrapped = wrapped_of(model)
    if wrapped.plan.config.weights == KEEP:
        return {}
    optimizers = wrapped.optimizers()
    if not optimizers or any(one is None for one in optimizers):
        raise ValueError(
            "the optimizer that memtrain.wrap returned has the lower bits of this model's weights, "
            "and was deleted (or this is a copy of the model); allowed: keep the optimizer, or "
            "copy both together with copy.deepcopy((model, optimizer))"
        )
    owners = [(one, masters_of(one)) for one in optimizers]
    groups = [
        (group, owner) for one, owner in owners for group in cast(Optimizer, one).param_groups
    ]
    return {p: owner for group, owner in groups for p in group["params"]}

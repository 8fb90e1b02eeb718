"""What `wrap` leaves on a model, and what can be asked of a wrapped one."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from memtrain.activations.adaptive.actnn import ActnnSensitivity
from memtrain.activations.adaptive.gact import GactAdapter
from memtrain.activations.intercept.hooks import Interception
from memtrain.plan.plan import Plan
from memtrain.plan.weights import ATTRIBUTE
from memtrain.precision.state import PrecisionState


@dataclass
class Wrapped:
    """What `wrap` leaves on the model."""

    plan: Plan
    interception: Interception | None
    weights: Any
    """A link to the optimizer's `SplitWeights`, empty without."""
    handles: list[Any]
    """Of the hooks that weights and gradients need."""


def wrapped_of(model: nn.Module) -> Wrapped:
    """What `wrap` left on a model.

    Raises:
        ValueError: If the model is not wrapped.
    """
    wrapped = getattr(model, ATTRIBUTE, None)
    if wrapped is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped by memtrain")
    return wrapped


def plan_of(model: nn.Module) -> Plan:
    """The plan that a wrapped model runs under.

    Args:
        model: A model that `wrap` returned.

    Raises:
        ValueError: If the model is not wrapped.
    """
    return wrapped_of(model).plan


def state_dict(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint needs besides the model's and the optimizer's own `state_dict`.

    Args:
        model: A model that `wrap` returned.

    Returns:
        `step`, the number of forward passes so far: it feeds the keys of stochastic rounding. Where
        a rule has `bits: auto`, also the present `bits` and what is known of the data set's
        `samples`. In mixed `precision`, the assignment, what was promoted and the loss scale. A run
        that restores them goes on bit for bit.
    """
    wrapped = wrapped_of(model)
    state: dict[str, Any] = {"step": wrapped.interception.saved.step if wrapped.interception else 0}
    if wrapped.plan.precision is not None:
        state["precision"] = wrapped.plan.precision.state_dict()
    if wrapped.plan.bits is not None and wrapped.interception is not None:
        watch = _statistics(wrapped.interception)
        if watch is not None:
            watch.flush()
        state["bits"] = wrapped.plan.bits.state_dict()
        state["samples"] = watch.state_dict() if watch is not None else {}
    return state


def load_state_dict(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Restore what `memtrain.state_dict` returned.

    Args:
        model: A model that `wrap` returned.
        state_dict: Of the run that is resumed.

    Raises:
        ValueError: If the model is not wrapped or the state has other keys.
    """
    wrapped = wrapped_of(model)
    bits, interception = wrapped.plan.bits, wrapped.interception
    keys = {"step"} if bits is None else {"step", "bits", "samples"}
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
        interception.resettle()
    watch = _statistics(interception)
    if watch is not None:
        watch.load_state_dict(state_dict["samples"])


def precision_state(model: nn.Module) -> PrecisionState:
    """What is low now, what was promoted and when, the low-precision ratio and the loss scale.

    Args:
        model: A model that `wrap` returned, with a `precision` in its config.

    Returns:
        The run's own state, which goes on changing; `print` tells it.

    Raises:
        ValueError: If the model is not wrapped, or nothing is rounded.

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
    """What measures again, for a config with `bits: auto` and `sensitivity=passes`.

    Args:
        model: A model that `wrap` returned.

    Returns:
        An object whose `step(closure)` is called once per training step.

    Raises:
        ValueError: If the model is not wrapped or no rule has automatic bits.

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


def _statistics(interception: Interception) -> ActnnSensitivity | None:
    watch = interception.saved.watch
    return watch if isinstance(watch, ActnnSensitivity) else None

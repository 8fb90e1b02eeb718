"""Apply a plan to a model and its optimizers (`wrap`), and undo this (`unwrap`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain import optim
from memtrain.activations.adaptive.actnn import ActnnSensitivity
from memtrain.activations.intercept.compiler_internals import forget_graphs, inside_compiled
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.saved.checks import Checks
from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import Config
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.states.in_groups import OWN
from memtrain.optim.states.optimizer_hooks import chain
from memtrain.optim.states.peers import read_by
from memtrain.optim.states.tested import is_tested
from memtrain.optim.wrappers.apply import (
    KEEP,
    apply,
    check,
    check_release,
    check_removable,
    remove,
)
from memtrain.optim.wrappers.wrapper import WeakRef
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.unmet import FirstStep, Untrained, warn_of_untested, warn_of_whole_states
from memtrain.precision.forward_rounding import ForwardRounding
from memtrain.wrap_checks import check_given, check_optimizers
from memtrain.wrapped import (
    ATTRIBUTE,
    ModelState,
    Wrapped,
    adapter,
    joined,
    load_state_dict,
    plan_of,
    precision_state,
    state_dict,
    wrapped_of,
)

__all__ = [
    "adapter",
    "load_state_dict",
    "plan_of",
    "precision_state",
    "state_dict",
    "unwrap",
    "wrap",
]


@dataclass
class _ChooseState:
    """Choose the compressor for a state of a parameter; a class, because closures do not pickle."""

    plan: Plan
    names: dict[nn.Parameter, str]
    model: WeakRef[nn.Module]
    tested: bool

    def __call__(self, param: Tensor, state: str) -> Compressor | Keep:
        own = cast(nn.Parameter, param)
        if own not in self.names and (model := self.model()) is not None:  # added, or sharded since
            self.names = {p: name for name, p in model.named_parameters()}
        name = self.names.get(own, "(added later)")
        return self.plan.choose_state(name, state, tested=self.tested)

    @property
    def seed(self) -> int:
        """Seed of the stochastic rounding of states."""
        return self.plan.config.seed


@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, cfg: Any = None, *, batch: Any = None
) -> tuple[nn.Module, Optimizer]: ...
@overload
def wrap(
    model: Sequence[nn.Module], optimizer: Optimizer, cfg: Any = None, *, batch: Any = None
) -> tuple[nn.ModuleList, Optimizer]: ...
@overload
def wrap(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Sequence[Optimizer],
    cfg: Any = None,
    *,
    batch: Any = None,
) -> tuple[nn.Module, list[Optimizer]]: ...
@overload
def wrap(
    model: nn.Module | Sequence[nn.Module], optimizer: None, cfg: Any = None, *, batch: Any = None
) -> tuple[nn.Module, None]: ...
def wrap(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    cfg: Any = None,
    *,
    batch: Any = None,
) -> tuple[nn.Module, Any]:
    """Compress saved activations, optimizer states, gradients and weights during training.

    The model is the same object with the same class and `state_dict`; hooks on its modules
    compress what its forward saves. The optimizer is a new object that shares its parameter
    groups with the old one, so schedulers made before keep working. It takes over the states and
    stores them compressed. Weights and gradients change only if the config says so (`all_four`
    does): float32 parameters then become bfloat16 in place, and `loss.backward()` updates them.
    torch's random stream is not changed.

    A model that is wrapped already is wrapped anew with the given optimizer. The optimizer that the
    earlier call returned is let go: its weights become float32 again, its next `step` raises.

    Args:
        model: The model, before or in the middle of a training run. What `torch.compile` returned
            is allowed, and a model may be compiled after `wrap`, in whole or in parts. A list of
            models that share an optimizer is wrapped as one `nn.ModuleList`.
        optimizer: Its optimizer, whose parameters must all be the model's. A list of optimizers
            with disjoint parameters (Muon and AdamW; a GAN's two) is returned as a list in the
            same order. None, with a config for activations only, for a loop whose optimizer
            memtrain cannot wrap. For an optimizer that accelerate's `prepare` returned, the
            optimizer inside is wrapped.
        cfg: A preset's name (`"balanced"` by default, `"smallest"`, `"all_four"`, `"exact"`,
            `"optimizer_only"`, `"activations_only"`), the YAML path of a config or of a plan
            (`Plan.save`), a list of Hydra overrides, a dict, a DictConfig, a `Config` or a `Plan`.
        batch: What the model is called with (a tensor, a tuple of arguments or a dict of keyword
            arguments): records the plan's activation sites now, without running the model on it.
            Without a batch the first training forward records them.

    Returns:
        The same model (a `ModuleList` for a list of models), and the optimizer or optimizers to
        use from now on.

    Raises:
        ValueError: If the model has no parameters, if the optimizer is one that `wrap` returned,
            holds parameters that are not the model's or is prepared with a GradScaler, or if the
            config is not valid. The model and the optimizer are unchanged.
        TypeError: For arguments of the wrong type.

    Warns:
        RuntimeWarning: If weights are split (`all_four`) and some that require gradients are in no
            group of an optimizer: they are rounded to 16 bits, and their lower bits are lost. If
            states stay exact since memtrain does not know their optimizer.

    Memory:
        `balanced`: 3 bits per element for the input of a nonlinearity, 4.25 bits for most other
        saved tensors, 0.53 bytes per parameter for AdamW's two moments (8 without memtrain).

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = wrap(model, optimizer, "balanced")
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> optimizer.step()
    """
    joint = isinstance(model, list | tuple)
    called = nn.ModuleList(model) if joint else cast(nn.Module, model)
    made = _on_steppers(optimizer, lambda steppers: _wrap(called, steppers, cfg, batch))
    if joint:
        for one in _listed(made):  # the ModuleList lives as long as what steps it
            vars(inner_optimizer(one))["_models"] = called
    return called, made


def _wrap(called: nn.Module, optimizers: list[Optimizer], cfg: Any, batch: Any) -> list[Optimizer]:
    model, plan = _planned(called, optimizers, cfg, batch)
    handles: list[Any] = []
    rounding = ForwardRounding(plan.precision) if plan.precision is not None else None
    interception = _interception(model, plan, rounding)
    if plan.state_rules:
        optimizers = _compressed(model, optimizers, plan)
    else:
        handles += [read_by(optimizer) for optimizer in optimizers]
    if rounding is not None:  # before the interception's own hook
        assign = partial(rounding.before_model, plan.assign_precision)
        handles.append(model.register_forward_pre_hook(assign, with_kwargs=True))
    if interception is not None:
        forget_graphs(called)
        interception.attach()
    optimizers, added = apply(model, optimizers, plan.config)
    handles += added
    if rounding is not None:
        handles += [rounding.scaler.attach(optimizer) for optimizer in optimizers]
    wrapped = Wrapped(plan, interception, handles)
    setattr(model, ATTRIBUTE, wrapped)
    if plan.config.weights != KEEP and not isinstance(called, nn.ModuleList):
        wrapped.keep(optimizers)  # which have the weights' lower bits
    _hook_steps(called, optimizers, wrapped)
    return optimizers


def _planned(
    called: nn.Module, optimizers: list[Optimizer], cfg: Any, batch: Any
) -> tuple[nn.Module, Plan]:
    """Validate the arguments, make the plan, and undo an earlier `wrap` of the same model."""
    model = inside_compiled(called) or called  # sites have the names of the module inside
    check_given(model, optimizers)
    plan = make_plan(called, optimizers, cfg, batch=batch)
    check(model, plan.config)
    check_optimizers(optimizers, plan)
    if not isinstance(cfg, Plan | Config):  # a planner's own choice may differ
        check_release(plan.config)
    warn_of_untested(plan, optimizers)
    if hasattr(model, ATTRIBUTE):
        _let_go(model, optimizers)
        plan = make_plan(called, optimizers, cfg, batch=batch)  # dtypes are the original ones again
    return model, plan


def _hook_steps(called: nn.Module, optimizers: list[Optimizer], wrapped: Wrapped) -> None:
    """Register step, state_dict and load_state_dict hooks on each optimizer."""
    model, interception = inside_compiled(called) or called, wrapped.interception
    first = None if interception is None else FirstStep(wrapped.plan, interception, called)
    if first is not None and not optimizers:
        wrapped.handles += first.attach_model(model)
    untrained = Untrained(model, optimizers, interception)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault(OWN, ())  # torch's flattened checkpoints load options of live groups
        wrapped.handles.append(optimizer.register_step_pre_hook(untrained))
        if wrapped.plan.state_rules:
            wrapped.handles.append(
                optimizer.register_step_post_hook(partial(warn_of_whole_states, wrapped.plan))
            )
        wrapped.handles.append(ModelState(wrapped).attach(optimizer))
        if first is not None:
            wrapped.handles.append(first.attach(optimizer))


def _compressed(model: nn.Module, optimizers: list[Optimizer], plan: Plan) -> list[Optimizer]:
    names = {p: name for name, p in model.named_parameters()}
    least, own = plan.config.optim.min_elements, WeakRef(model)
    chosen = [(one, _ChooseState(plan, names, own, is_tested(one))) for one in optimizers]
    return [optim.compress(one, choose, min_elements=least) for one, choose in chosen]


def unwrap(model: nn.Module | Sequence[nn.Module], optimizer: Any) -> tuple[nn.Module, Any]:
    """Take everything back: no hooks, and a plain torch optimizer with decompressed states.

    Args:
        model: A model that `wrap` returned, or the list that it was given.
        optimizer: The optimizer that `wrap` returned with it; a list or None if that was one.

    Returns:
        The same model, and the optimizer that was given to `wrap` (a list, or None).

    Raises:
        ValueError: If the model is not wrapped, or the optimizer is not the one that `wrap`
            returned with it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 128)
        >>> model, optimizer = wrap(model, torch.optim.AdamW(model.parameters()))
        >>> type(unwrap(model, optimizer)[1]).__name__
        'AdamW'
    """
    called = joined(model, map(inner_optimizer, _listed(optimizer)))
    inside = inside_compiled(called) or called
    return called, _on_steppers(optimizer, lambda steppers: _unwrap(inside, steppers))


def _unwrap(model: nn.Module, optimizers: list[Optimizer]) -> list[Optimizer]:
    wrapped = wrapped_of(model)
    plan = wrapped.plan
    for optimizer in optimizers:
        check_removable(optimizer, plan.config)
    _check_all_given(wrapped, optimizers)
    plain = remove(optimizers, wrapped.handles)
    if plan.state_rules:
        for one in plain:
            if not isinstance(one, optim.CompressedStates):
                raise ValueError(_not_returned(one))
        plain = [optim.restore(one) for one in plain]
    _detach(model, plain)
    return plain


def _not_returned(optimizer: Optimizer) -> str:
    return (
        f"unwrap needs the optimizer that wrap returned, not a plain {type(optimizer).__name__}; "
        "to unwrap a copy of both, copy them together: copy.deepcopy((model, optimizer))"
    )


def _check_all_given(wrapped: Wrapped, optimizers: list[Optimizer]) -> None:
    """Raise unless these are the optimizers of the model, as far as they are known."""
    known = wrapped.optimizers()
    if any(one is None for one in known):  # of a copy
        return
    if len(known) != len(optimizers):
        raise ValueError(
            f"unwrap got {len(optimizers)} optimizers and wrap returned {len(known)} with this "
            "model; allowed: all of them, as the list that wrap returned"
        )


def _detach(model: nn.Module, optimizers: list[Optimizer]) -> None:
    wrapped = wrapped_of(model)
    if wrapped.interception is not None:
        wrapped.interception.detach()
    for optimizer in optimizers:
        vars(optimizer).pop("_models", None)
        for group in optimizer.param_groups:
            group.pop(OWN, None)
    delattr(model, ATTRIBUTE)


def _let_go(model: nn.Module, coming: list[Optimizer]) -> None:
    """Undo an earlier `wrap` of a model.

    States stay compressed, except for an optimizer that is wrapped again.
    """
    wrapped = wrapped_of(model)
    old = [one for one in wrapped.optimizers() if one is not None]
    if any(one in chain(other) for one in coming for other in old):
        _unwrap(model, old)
        return
    if len(old) < len(wrapped.optimizers()) and wrapped.plan.config.weights != KEEP:
        raise ValueError(
            "the optimizer that memtrain.wrap returned with this model has the weights' lower bits "
            "and is gone, as for a copy of a model; allowed: copy.deepcopy((model, optimizer)), or "
            "a new model that loads fp32_state_dict of the first"
        )
    plain = remove(old, wrapped.handles)
    for optimizer in (*old, *plain):
        if optimizer not in plain or isinstance(optimizer, optim.CompressedStates):
            vars(optimizer)["step"] = _refuse_step
    _detach(model, plain)


def _refuse_step(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "a later memtrain.wrap of the model took another optimizer in place of this one; step the "
        "optimizer that it returned; memtrain.wrap(model, [first, second]) wraps several at once"
    )


def _listed(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]


def _on_steppers(
    optimizer: Any, work: Callable[[list[Optimizer]], list[Optimizer]]
) -> Optimizer | list[Optimizer] | None:
    """Call `work` with the optimizers that step, and return what it returns in the given form."""
    given = _listed(optimizer)
    holders = [_holder(one) for one in given]
    made: list[Any] = work([inner_optimizer(one) for one in given])
    for index, holder in enumerate(holders):
        if holder is not None:
            holder.optimizer, made[index] = made[index], holder
    return made if isinstance(optimizer, list | tuple) else (made or [None])[0]


def _holder(optimizer: Any) -> Any:
    """The given optimizer if another one inside it steps, as accelerate's `prepare` makes it."""
    if inner_optimizer(optimizer) is optimizer:
        return None
    if getattr(optimizer, "scaler", None) is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} steps through a GradScaler that holds the optimizer "
            "inside: call memtrain.wrap before accelerator.prepare"
        )
    return optimizer


def _interception(
    model: nn.Module, plan: Plan, rounding: ForwardRounding | None
) -> Interception | None:
    """The interception of a model's forwards; None where nothing is done to them."""
    if not plan.intercepts:
        return None
    interception = Interception(
        model,
        plan.choose_activation,
        options=plan.options,
        seed=plan.config.seed,
        on_saved=plan.record,
        rounding=rounding,
        compresses=plan.compresses,
    )
    interception.saved.watch = _watch(plan)
    if plan.config.activations.verify:
        interception.saved.checks = Checks(_refuse_fault, forwards=3)
    return interception


def _refuse_fault(fault: str) -> None:
    raise RuntimeError(
        f"activations.verify: {fault}. Keep it with a rule in activations.exceptions, and report "
        "this as a bug of memtrain"
    )


def _watch(plan: Plan) -> ActnnSensitivity | None:
    """ActNN's measurement, where it is asked for."""
    own = plan.config.activations
    if plan.bits is None or own.sensitivity != "statistics":
        return None
    return ActnnSensitivity(plan.bits, own.adapt_interval)

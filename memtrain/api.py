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
from memtrain.optim.states.checkpoint_options import KEY
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.states.known_optimizers import is_tested
from memtrain.optim.states.optimizer_hooks import chain
from memtrain.optim.states.plain_checkpoints import refuse_payloads
from memtrain.optim.wrappers.apply import KEEP, apply, check, check_release, remove
from memtrain.optim.wrappers.wrapper import WeakRef
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.training_warnings import (
    FirstStepReport,
    UntrainedParameters,
    warn_of_kept_states,
)
from memtrain.precision.forward_rounding import ForwardRounding
from memtrain.wrap_checks import check_arguments, check_requests
from memtrain.wrapped import (
    ATTRIBUTE,
    StateDictHooks,
    Wrapped,
    adapter,
    load_state_dict,
    module_list_of,
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
class _StateCompressors:
    """A callable that returns the compressor for a state; unlike a closure, it can be pickled."""

    plan: Plan
    names: dict[nn.Parameter, str]
    model: WeakRef[nn.Module]
    tested: bool

    def __call__(self, param: Tensor, state: str) -> Compressor | Keep:
        parameter = cast(nn.Parameter, param)
        if (
            parameter not in self.names and (model := self.model()) is not None
        ):  # added, or sharded since
            self.names = {p: name for name, p in model.named_parameters()}
        name = self.names.get(parameter, "(added later)")
        text = str(state)  # heavyball has numbers
        return self.plan.choose_state(name, text, tested=self.tested)

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

    The model stays the same object, with the same class and `state_dict`. Hooks on its modules
    compress the tensors that autograd saves. The optimizer is a new object that shares the
    parameter groups of the old one, so existing schedulers keep working; it compresses the states.
    Weights and gradients change only if the config requests it (as `all_four` does): float32
    parameters become bfloat16 in place, and `loss.backward()` updates them. torch's random state
    does not change.

    A wrapped model can be wrapped again with another optimizer. This undoes the earlier `wrap`:
    weights become float32 again, and the earlier optimizer's next `step` raises.

    Args:
        model: The model, before or during training. It may be compiled by `torch.compile`, before
            or after `wrap`, as a whole or in parts. A list of models that share an optimizer is
            wrapped as one `nn.ModuleList`.
        optimizer: The model's optimizer, without parameters of other models. A list of optimizers
            with disjoint parameters (Muon and AdamW) is returned as a list in the same order. None
            for an optimizer that memtrain cannot wrap, with a config for activations only. For an
            optimizer from accelerate's `prepare`, the optimizer inside is wrapped.
        cfg: A preset's name (`"balanced"` by default, `"smallest"`, `"all_four"`, `"exact"`,
            `"optimizer_only"`, `"activations_only"`), the YAML path of a config or of a plan
            (`Plan.save`), a list of Hydra overrides, a dict, a DictConfig, a `Config` or a `Plan`.
        batch: The model's input (a tensor, a tuple of arguments or a dict of keyword arguments).
            With a batch, a forward on fake tensors records the plan's activation sites now;
            otherwise the first training forward records them.

    Returns:
        The same model (a `ModuleList` for a list of models), and the optimizer or optimizers to
        use from now on.

    Raises:
        ValueError: If the model has no parameters, if `wrap` returned this optimizer, if the
            optimizer has parameters of another model or a GradScaler, or if the config is not
            valid. The model and the optimizer are unchanged.
        TypeError: For arguments of the wrong type.

    Warns:
        RuntimeWarning: If weights are split (`all_four`), for trainable weights without an
            optimizer: they are rounded to 16 bits. Also for states that stay exact because memtrain
            does not know their optimizer.

    Memory:
        `balanced`: 1 to 8 bits per element of a saved tensor, by op (4.25 for the input of a linear
        layer, with the bounds of its groups). AdamW's two moments: 0.53 bytes per parameter of a
        large matrix (8 without memtrain).

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = wrap(model, optimizer, "balanced")
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> optimizer.step()
    """
    is_list = isinstance(model, list | tuple)
    outer_model = nn.ModuleList(model) if is_list else cast(nn.Module, model)
    results = _with_inner_optimizers(optimizer, lambda inner: _wrap(outer_model, inner, cfg, batch))
    if is_list:
        for one in _as_list(results):  # the ModuleList lives as long as what steps it
            vars(inner_optimizer(one))["_models"] = outer_model
    return outer_model, results


def _wrap(
    outer_model: nn.Module, optimizers: list[Optimizer], cfg: Any, batch: Any
) -> list[Optimizer]:
    model, plan = _validated_plan(outer_model, optimizers, cfg, batch)
    handles: list[Any] = []
    rounding = ForwardRounding(plan.precision) if plan.precision is not None else None
    interception = _interception(model, plan, rounding)
    if plan.state_rules:
        optimizers = _compress_states(model, optimizers, plan)
    else:
        handles += [refuse_payloads(optimizer) for optimizer in optimizers]
    if rounding is not None:  # before the interception's own hook
        assign = partial(rounding.before_model, plan.assign_precision)
        handles.append(model.register_forward_pre_hook(assign, with_kwargs=True))
    if interception is not None:
        forget_graphs()
        interception.attach()
    optimizers, added = apply(model, optimizers, plan.config)
    handles += added
    if rounding is not None:
        handles += [rounding.scaler.attach(optimizer) for optimizer in optimizers]
    wrapped = Wrapped(plan, interception, handles)
    setattr(model, ATTRIBUTE, wrapped)
    if plan.config.weights != KEEP and not isinstance(outer_model, nn.ModuleList):
        wrapped.keep_alive(optimizers)  # which have the weights' lower bits
    _register_optimizer_hooks(outer_model, optimizers, wrapped)
    return optimizers


def _validated_plan(
    outer_model: nn.Module, optimizers: list[Optimizer], cfg: Any, batch: Any
) -> tuple[nn.Module, Plan]:
    """Validate the arguments, make the plan, and undo an earlier `wrap` of the same model."""
    model = inside_compiled(outer_model) or outer_model  # sites have the names of the module inside
    check_arguments(model, optimizers)
    plan = make_plan(outer_model, optimizers, cfg, batch=batch)
    check(model, plan.config)
    check_requests(optimizers, plan)
    if not isinstance(cfg, Plan | Config):  # a planner's own choice may differ
        check_release(plan.config)
    warn_of_kept_states(plan, optimizers)
    if hasattr(model, ATTRIBUTE):
        _undo_earlier_wrap(model, optimizers)
        # The dtypes are the original ones again.
        plan = make_plan(outer_model, optimizers, cfg, batch=batch)
    return model, plan


def _register_optimizer_hooks(
    outer_model: nn.Module, optimizers: list[Optimizer], wrapped: Wrapped
) -> None:
    """Register step, state_dict and load_state_dict hooks on each optimizer."""
    model, interception = inside_compiled(outer_model) or outer_model, wrapped.interception
    first = None
    if interception is not None:
        first = FirstStepReport(wrapped.plan, interception, outer_model)
    if first is not None and not optimizers:
        wrapped.handles += first.attach_model(model)
    untrained = UntrainedParameters(model, optimizers, interception)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault(KEY, ())  # torch's flattened checkpoints load options of live groups
        wrapped.handles.append(optimizer.register_step_pre_hook(untrained))
        wrapped.handles.append(StateDictHooks(wrapped).attach(optimizer))
        if first is not None:
            wrapped.handles.append(first.attach(optimizer))


def _compress_states(model: nn.Module, optimizers: list[Optimizer], plan: Plan) -> list[Optimizer]:
    names = {p: name for name, p in model.named_parameters()}
    min_elements, reference = plan.config.optim.min_elements, WeakRef(model)
    chosen = [
        (one, _StateCompressors(plan, names, reference, is_tested(one))) for one in optimizers
    ]
    return [optim.compress(one, choose, min_elements=min_elements) for one, choose in chosen]


def unwrap(model: nn.Module | Sequence[nn.Module], optimizer: Any) -> tuple[nn.Module, Any]:
    """Undo `wrap`: remove all hooks, and return the torch optimizer with decompressed states.

    Args:
        model: A model that `wrap` returned, or the list of models that was passed to `wrap`.
        optimizer: The optimizer, the list of optimizers, or the None that `wrap` returned.

    Returns:
        The same model, and the optimizer that was passed to `wrap` (a list, or None).

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
    outer_model = module_list_of(model, map(inner_optimizer, _as_list(optimizer)))
    inner_model = inside_compiled(outer_model) or outer_model

    def undo(inner: list[Optimizer]) -> list[Optimizer]:
        _check_optimizers(wrapped_of(inner_model), inner)
        return _unwrap(inner_model, inner)

    return outer_model, _with_inner_optimizers(optimizer, undo)


def _check_optimizers(wrapped: Wrapped, optimizers: list[Optimizer]) -> None:
    """Raise unless `wrap` returned these optimizers and no others with the model."""
    known, config = wrapped.optimizers(), wrapped.plan.config
    is_plain = not wrapped.plan.state_rules and config.weights == config.gradients == KEEP
    if None in known and is_plain:  # torch copies no hooks
        return
    for one in optimizers:
        if one not in known:
            raise ValueError(
                f"unwrap needs the optimizer that wrap returned, not this {type(one).__name__}; to "
                "unwrap a copy of both, copy them together: copy.deepcopy((model, optimizer))"
            )
    if len(known) != len(optimizers):
        raise ValueError(
            f"unwrap got {len(optimizers)} optimizers and wrap returned {len(known)} with this "
            "model; allowed: all of them, as the list that wrap returned"
        )


def _unwrap(model: nn.Module, optimizers: list[Optimizer]) -> list[Optimizer]:
    wrapped = wrapped_of(model)
    plain = remove(optimizers, wrapped.handles)
    if wrapped.plan.state_rules:
        plain = [optim.restore(one) for one in plain]
    _detach(model, plain)
    return plain


def _detach(model: nn.Module, optimizers: list[Optimizer]) -> None:
    wrapped = wrapped_of(model)
    if wrapped.interception is not None:
        wrapped.interception.detach()
    for optimizer in optimizers:
        vars(optimizer).pop("_models", None)
        for group in optimizer.param_groups:
            group.pop(KEY, None)
    delattr(model, ATTRIBUTE)


def _undo_earlier_wrap(model: nn.Module, new_optimizers: list[Optimizer]) -> None:
    """Undo an earlier `wrap` of a model.

    States stay compressed, except for an optimizer that is wrapped again.
    """
    wrapped = wrapped_of(model)
    old = [one for one in wrapped.optimizers() if one is not None]
    if any(one in chain(other) for one in new_optimizers for other in old):
        _unwrap(model, old)
        return
    if len(old) < len(wrapped.optimizers()) and wrapped.plan.config.weights != KEEP:
        raise ValueError(
            "the optimizer that memtrain.wrap returned with this model has the weights' lower bits "
            "and was deleted (or this is a copy of the model); allowed: "
            "copy.deepcopy((model, optimizer)), or a new model that loads fp32_state_dict"
        )
    plain = remove(old, wrapped.handles)
    for optimizer in (*old, *plain):
        if optimizer not in plain or isinstance(optimizer, optim.CompressedStates):
            vars(optimizer)["step"] = _raise_replaced
    _detach(model, plain)


def _raise_replaced(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "a later memtrain.wrap of the model replaced this optimizer; use the optimizer that it "
        "returned; memtrain.wrap(model, [first, second]) wraps several optimizers"
    )


def _as_list(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]


def _with_inner_optimizers(
    optimizer: Any, work: Callable[[list[Optimizer]], list[Optimizer]]
) -> Optimizer | list[Optimizer] | None:
    """Call `work` with the inner optimizers; return its results as a list, an optimizer or None."""
    outer_optimizers = _as_list(optimizer)
    outers = [_outer_optimizer(one) for one in outer_optimizers]
    results: list[Any] = work([inner_optimizer(one) for one in outer_optimizers])
    for index, outer in enumerate(outers):
        if outer is not None:
            outer.optimizer, results[index] = results[index], outer
    return results if isinstance(optimizer, list | tuple) else (results or [None])[0]


def _outer_optimizer(optimizer: Any) -> Any:
    """Return accelerate's wrapper around an optimizer, or None for any other optimizer."""
    if inner_optimizer(optimizer) is optimizer:
        return None
    if getattr(optimizer, "scaler", None) is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} has a GradScaler that refers to the inner optimizer: "
            "call memtrain.wrap before accelerator.prepare"
        )
    return optimizer


def _interception(
    model: nn.Module, plan: Plan, rounding: ForwardRounding | None
) -> Interception | None:
    """Return the interception of a model's forwards; None if the plan does not change them."""
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
    interception.saved.watch = _actnn_sensitivity(plan)
    if plan.config.activations.verify:
        interception.saved.checks = Checks(_raise_verify_error, forwards=3)
    return interception


def _raise_verify_error(fault: str) -> None:
    raise RuntimeError(
        f"activations.verify: {fault}. Keep it with a rule in activations.exceptions, and report "
        "this as a bug of memtrain"
    )


def _actnn_sensitivity(plan: Plan) -> ActnnSensitivity | None:
    """Return ActNN's measurement of sensitivities, if the plan requests it."""
    activations = plan.config.activations
    if plan.bits is None or activations.sensitivity != "statistics":
        return None
    return ActnnSensitivity(plan.bits, activations.adapt_interval)

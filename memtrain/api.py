"""`wrap` and `unwrap`: a plan, applied to a model and its optimizer, and taken back."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain import optim
from memtrain.activations.adaptive.actnn import ActnnSensitivity
from memtrain.activations.intercept.compiler_internals import forget_graphs, inside_compiled
from memtrain.activations.intercept.hooks import Interception
from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import Config
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.states.in_groups import OWN
from memtrain.optim.states.peers import read_by
from memtrain.optim.states.shards import in_zero
from memtrain.optim.wrappers.apply import (
    apply,
    check,
    check_release,
    check_removable,
    has_large_gradients,
    remove,
    steps_in_rows,
)
from memtrain.optim.wrappers.wrapper import WeakRef
from memtrain.plan.entries import sum_compressor
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.rules import NO_RULE
from memtrain.plan.unmet import FirstStep
from memtrain.precision.forward_rounding import ForwardRounding
from memtrain.wrapped import (
    ATTRIBUTE,
    ModelState,
    Untrained,
    Wrapped,
    adapter,
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
    """A plan's choice by parameter instead of name; a class, so that optimizers pickle."""

    plan: Plan
    names: dict[nn.Parameter, str]
    model: WeakRef[nn.Module]

    def __call__(self, param: Tensor, state: str) -> Compressor | Keep:
        own = cast(nn.Parameter, param)
        if own not in self.names and (model := self.model()) is not None:  # added, or sharded since
            self.names = {p: name for name, p in model.named_parameters()}
        return self.plan.choose_state(self.names.get(own, "(added later)"), state)

    @property
    def seed(self) -> int:
        """Seed of the stochastic rounding of states."""
        return self.plan.config.seed


def wrap(
    model: nn.Module, optimizer: Optimizer, cfg: Any = None, *, batch: Any = None
) -> tuple[nn.Module, Optimizer]:
    """Make training take a fraction of its memory; the loop around stays as it is.

    The model is the same object with the same class and `state_dict`; hooks on its modules
    compress what its forward saves. The optimizer is a new object that shares its parameter
    groups with the old one (so schedulers made before keep working), carries its state over and
    holds it compressed. Weights and gradients are touched where the config says so (`all_four`
    does): float32 parameters then become bfloat16 in place, and `loss.backward()` updates them.
    The random stream of torch is not touched.

    Args:
        model: The model, before or in the middle of a training run; what `torch.compile` made of
            one, too, and it may be compiled later, whole or in parts.
        optimizer: Its optimizer; all its parameters must be the model's. Of the one that
            accelerate's `prepare` returned, the optimizer inside is taken.
        cfg: A preset's name (`"balanced"` by default, `"smallest"`, `"all_four"`, `"exact"`,
            `"optimizer_only"`, `"activations_only"`), the YAML path of a config or of a plan
            (`Plan.save`), a list of Hydra overrides, a dict, a DictConfig, a `Config` or a `Plan`.
        batch: What the model is called with (a tensor, a tuple of arguments or a dict of keyword
            arguments): records the plan's activation sites at once, without running the model on
            it. Without it the first training forward records them.

    Returns:
        The same model, and the optimizer to use from now on.

    Raises:
        ValueError: If the model has no parameters or is wrapped already, if the optimizer holds
            parameters that are not the model's or is prepared with a GradScaler, or for a config
            that is not valid. Nothing has been changed then.
        TypeError: For arguments of the wrong type.

    Warns:
        RuntimeWarning: If weights are split (`all_four`) and some that require gradients are in no
            group of the optimizer: they are rounded to 16 bits, and no one keeps their lower bits.

    Memory:
        `balanced`: 3 bits per element for the input of a nonlinearity, 4.25 bits for most other
        saved tensors, 0.53 bytes per parameter for AdamW's two moments (8 plain).

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = wrap(model, optimizer, "balanced")
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> optimizer.step()
    """
    holder: Any = _holder(optimizer)
    if holder is not None:
        model, holder.optimizer = wrap(model, holder.optimizer, cfg, batch=batch)
        return model, holder
    called = model
    model = inside_compiled(called) or called  # sites have the names of the one that was compiled
    _check(model, optimizer)
    plan = make_plan(called, optimizer, cfg, batch=batch)
    check(model, plan.config)
    if not isinstance(cfg, Plan | Config):  # these may be a planner's, which chose otherwise
        check_release(plan.config)
    handles = []
    rounding = ForwardRounding(plan.precision, NO_RULE) if plan.precision is not None else None
    interception = _interception(model, plan, rounding)
    if plan.state_rules:
        names = {p: name for name, p in model.named_parameters()}
        choose = _ChooseState(plan, names, WeakRef(model))
        least = plan.config.optim.min_elements
        optimizer = optim.compress(optimizer, choose, min_elements=least)
    else:
        handles.append(read_by(optimizer))
    if rounding is not None:  # before the interception's own hook
        assign = partial(rounding.before_model, plan.assign_precision)
        handles.append(model.register_forward_pre_hook(assign, with_kwargs=True))
    if interception is not None:
        forget_graphs(called)
        interception.attach()
    optimizer, weights, added = apply(model, optimizer, plan.config, sum_compressor(plan.config))
    handles += added
    if interception is not None and steps_in_rows(model, optimizer):
        interception.make_in_rows()
    if rounding is not None:
        handles.append(rounding.scaler.attach(optimizer))
    setattr(model, ATTRIBUTE, Wrapped(plan, interception, weights, handles))
    for group in optimizer.param_groups:
        group.setdefault(OWN, ())  # torch's flattened checkpoints load the options of live groups
    untrained = Untrained(model, optimizer, interception)
    handles.append(optimizer.register_step_pre_hook(untrained))
    if interception is not None:
        handles.append(ModelState(wrapped_of(model)).attach(optimizer))
        handles.append(FirstStep(plan, interception, called).attach(optimizer))
    return called, optimizer


def unwrap(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Put everything back: hooks off, and a plain torch optimizer with its states decompressed.

    Args:
        model: A model that `wrap` returned.
        optimizer: The optimizer that `wrap` returned with it.

    Returns:
        The same model, and the optimizer that was given to `wrap`.

    Raises:
        ValueError: If the model is not wrapped, or the optimizer is the one given to `wrap`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 128)
        >>> model, optimizer = wrap(model, torch.optim.AdamW(model.parameters()))
        >>> type(unwrap(model, optimizer)[1]).__name__
        'AdamW'
    """
    holder: Any = _holder(optimizer)
    if holder is not None:
        model, holder.optimizer = unwrap(model, holder.optimizer)
        return model, holder
    inside = inside_compiled(model)
    if inside is not None:
        return model, unwrap(inside, optimizer)[1]
    wrapped = wrapped_of(model)
    check_removable(optimizer, wrapped.plan.config)
    optimizer = remove(optimizer, wrapped.handles)
    if wrapped.plan.state_rules:
        if not isinstance(optimizer, optim.CompressedStates):
            given = type(optimizer).__name__
            raise ValueError(
                f"unwrap needs the optimizer that wrap returned, not a plain {given}; of a copy of "
                "both: copy.deepcopy((model, optimizer))"
            )
        optimizer = optim.restore(optimizer)
    if wrapped.interception is not None:
        wrapped.interception.detach()
    for group in optimizer.param_groups:
        group.pop(OWN, None)
    delattr(model, ATTRIBUTE)
    return model, optimizer


def _holder(optimizer: Any) -> Any:
    """An optimizer without hooks around the one that steps, as accelerate's `prepare` makes it."""
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
    if not plan.intercepts and not has_large_gradients(model, plan.config):
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
    interception.saved.watch = _watch(interception, plan)
    return interception


def _watch(interception: Interception, plan: Plan) -> ActnnSensitivity | None:
    """ActNN's measurement, where it is asked for."""
    own = plan.config.activations
    if plan.bits is None or own.sensitivity != "statistics":
        return None
    return ActnnSensitivity(
        plan.bits,
        own.adapt_interval,
        per_sample=own.sample_statistics,
        parameters=interception.parameters,
    )


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    for name, module in model.named_modules():
        if hasattr(module, ATTRIBUTE):
            raise ValueError(
                f"{name or 'the model'} is wrapped already; unwrap(model, optimizer) undoes it"
            )
    own = set(model.parameters())
    if not own:
        raise ValueError(f"this {type(model).__name__} has no parameters: nothing to train")
    strangers = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if strangers and in_zero(own):
        raise ValueError(
            "DeepSpeed's ZeRO has joined the optimizer's parameters to flat vectors: call "
            "memtrain.wrap before deepspeed.initialize, with weights=keep and gradients=keep"
        )
    if strangers:
        raise ValueError(
            f"the optimizer holds {strangers} parameters that are not the model's: wrap one module "
            "that has them all (a ModuleList, say), or give them an optimizer of their own"
        )

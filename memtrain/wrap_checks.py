"""Checks of the arguments of `wrap`, before anything is changed."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from memtrain.config.sources import Config
from memtrain.optim.states.compressed import refuse
from memtrain.optim.states.compressed_states import is_taken_over
from memtrain.optim.states.optimizer_hooks import chain, innermost
from memtrain.optim.states.shards import in_zero
from memtrain.optim.wrappers.apply import CPU, KEEP
from memtrain.optim.wrappers.release_checks import check_separable
from memtrain.plan.plan import Plan
from memtrain.wrapped import ATTRIBUTE, is_wrapped_with, wrapped_of


def check_arguments(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise for models and optimizers that `wrap` does not accept."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is of type {type(model).__name__}; allowed: wrap(model, optimizer) with a "
            "torch.nn.Module, or a list of them"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer is of type {type(optimizer).__name__}; allowed: None, or a "
                "torch.optim.Optimizer such as AdamW(model.parameters()), or a list of them"
            )
    for name, module in model.named_modules():
        if name and hasattr(module, ATTRIBUTE):
            raise ValueError(
                f"{name} is wrapped already; allowed: unwrap it first, with its optimizer, then "
                "wrap the whole model with the list of its optimizers"
            )
    if any(is_wrapped_with(model, one) for one in optimizers):
        raise ValueError(
            "the model is wrapped already with this optimizer; allowed: unwrap(model, optimizer) "
            "first, to wrap it under another config, or a new optimizer"
        )
    known = wrapped_of(model).optimizers() if hasattr(model, ATTRIBUTE) else []
    inside = [one for outer in known for one in chain(outer)]
    if any(is_taken_over(one) and one not in inside for one in optimizers):
        raise ValueError(
            "another optimizer from memtrain took the states of this one (for another model, or it "
            "was deleted); allowed: memtrain.unwrap of that optimizer first, or a new optimizer"
        )
    _check_parameters(model, optimizers)


def _check_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    parameters = set(model.parameters())
    if not parameters:
        raise ValueError(f"this {type(model).__name__} has no parameters: nothing to train")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet (lazy modules): run one forward, then make the optimizer "
            "and wrap both"
        )
    trained = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    unknown = sum(p not in parameters for p in trained)
    if unknown and in_zero(parameters):
        raise ValueError(
            "DeepSpeed's ZeRO has joined the optimizer's parameters to flat vectors: call "
            "memtrain.wrap before deepspeed.initialize, with weights=keep and gradients=keep"
        )
    if unknown:
        raise ValueError(
            f"the optimizer has {unknown} parameters that are not the model's; allowed: "
            "wrap([model, other], optimizer) with all models that it trains, or one optimizer for "
            "each model"
        )
    if len(set(trained)) < len(trained):
        raise ValueError(
            f"{len(trained) - len(set(trained))} parameters are in two optimizers of the list; "
            "allowed: each parameter in one"
        )


def check_requests(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Raise for a plan that the optimizers do not support."""
    config = plan.config
    requests = {
        "optim=none": bool(plan.state_rules),
        "weights=keep": config.weights != KEEP,
        "gradients=keep": config.gradients != KEEP,
        "precision=none": plan.precision is not None,
    }
    missing = [allowed for allowed, is_requested in requests.items() if is_requested]
    if not optimizers and missing:
        raise ValueError(
            "optimizer=None with a config that changes more than saved activations; allowed: "
            f"cfg='activations_only', or {', '.join(missing)} in this config"
        )
    if len(optimizers) > 1 and plan.precision is not None:
        raise ValueError(
            f"precision={config.precision.assignment} with {len(optimizers)} optimizers: one loss "
            "scale decides for all; allowed: one optimizer, or precision=none"
        )
    for optimizer in optimizers:
        if plan.state_rules:
            refuse(innermost(optimizer))
        _check_optimizer(optimizer, config)


def _check_optimizer(optimizer: Optimizer, config: Config) -> None:
    """Raise for an optimizer whose parameters must be stepped, or moved, all at once."""
    name = type(optimizer).__name__
    if config.gradients != KEEP:
        check_separable(optimizer)
    around = config.weights != KEEP or config.optim.device == CPU
    if around and callable(getattr(optimizer, "eval", None)):
        raise ValueError(
            f"{name} has train() and eval(), which change float32 weights in place; allowed with "
            f"it: weights=keep and optim.device=keep, not weights={config.weights!r}, "
            f"optim.device={config.optim.device!r}"
        )

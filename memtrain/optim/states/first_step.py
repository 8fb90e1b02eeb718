"""States that a plain optimizer's first step would make, without data."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.optim.states.known_optimizers import SEPARABLE


def raw_step(optimizer: Optimizer, *args: Callable[[], Any]) -> Any:
    """The class's step without the hooks and the profiler: those belong to the outer step.

    Args:
        optimizer: Whose.
        args: A closure, or nothing.

    Returns:
        The closure's loss, or None.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, *args)


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that steps, of what accelerate's `prepare` puts around it.

    Its attributes are the inner one's: who copies it and changes those changes the inner one.

    Args:
        optimizer: Any.

    Returns:
        The inner optimizer, or the one that was given.

    Example:
        >>> sgd = torch.optim.SGD([torch.ones(2)])
        >>> inner_optimizer(sgd) is sgd
        True
    """
    inner = getattr(optimizer, "optimizer", None)
    is_held = isinstance(inner, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks")
    return inner if is_held else optimizer  # pyright: ignore[reportReturnType]


def without_states(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind and groups, without states or hooks.

    Its containers and tensors are copies, parameters excepted: bitsandbytes' first step moves
    tables of the optimizer to the device of a parameter, which may be `meta`.
    """
    alone = object.__new__(type(optimizer))
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("step", "state"):  # `step`: a scheduler's, bound to the real optimizer
            vars(alone)[name] = _copied(value, params)
    alone.state = defaultdict(dict)
    alone._optimizer_step_pre_hooks = OrderedDict()
    alone._optimizer_step_post_hooks = OrderedDict()
    return alone


def _copied(value: Any, kept: set[int]) -> Any:
    """Copy the containers of a value and the tensors in them, but not the tensors in `kept`."""
    if isinstance(value, Tensor):
        return value if id(value) in kept else value.detach().clone()
    if not isinstance(value, dict | list):
        return value
    copied = copy(value)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        copied[key] = _copied(item, kept)
    return copied


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, which `grad_dtype` may make another one.

    Example:
        >>> gradient_dtype(torch.nn.Parameter(torch.ones(2)))
        torch.float32
    """
    return getattr(param, "grad_dtype", None) or param.dtype


def first_states(
    optimizer: Optimizer, param: Tensor, group: dict[str, Any], device: str = "meta"
) -> dict[str, Any]:
    """The states that a plain optimizer's first step makes for a parameter.

    Args:
        optimizer: A plain torch optimizer; it is not changed.
        param: One of its parameters; only its shape, dtype and `grad_dtype` are read.
        group: The parameter's group.
        device: Where the step is made.

    Returns:
        State name -> value, tensors on that device; of a sharded parameter those of the whole.

    Raises:
        Exception: Whatever the optimizer's step raises, on tensors without data if on `meta`.

    Example:
        >>> adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
        >>> first_states(adamw, torch.ones(2), adamw.param_groups[0])["exp_avg"].device
        device(type='meta')
    """
    like = torch.zeros(param.shape, dtype=param.dtype, device=device, requires_grad=True)
    kind = gradient_dtype(param)
    if kind != like.dtype:
        like.grad_dtype = kind
    like.grad = torch.zeros_like(like, dtype=kind)
    alone = without_states(optimizer)
    # Fused and capturable steps keep the same states, but refuse this device.
    options = {name: False for name in ("foreach", "fused", "capturable") if name in group}
    own = {key: _copied(value, set()) for key, value in group.items() if key != "params"}
    groups = [{**own, **options, "params": [like]}]
    alone.param_groups = groups
    try:
        raw_step(alone)
    except KeyError:  # it makes states when it is made, as Adagrad of torch 2.11 does
        made_by: Any = type(optimizer)  # torch's own take groups alone
        alone = made_by(groups)
        raw_step(alone)
    return dict(alone.state[like])


def first_names(optimizer: Optimizer, param: Tensor, group: dict[str, Any]) -> set[str] | None:
    """Names of the states that a plain optimizer's first step makes for a parameter.

    Args:
        optimizer: A plain torch optimizer; it is not changed.
        param: Only its dtype and number of dimensions are read.
        group: The options of the step.

    Returns:
        The names, or None where the step of an optimizer that is not torch's raises.

    Example:
        >>> adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
        >>> sorted(first_names(adamw, torch.ones(2), adamw.param_groups[0]))
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    tiny = torch.empty((1,) * param.dim(), dtype=param.dtype, device="meta")
    with suppress(Exception):
        return set(first_states(optimizer, tiny, group, "cpu"))
    return None


def state_shapes(
    optimizer: Optimizer, param: Tensor, group: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a torch optimizer keeps for a parameter.

    torch's states have the parameter's dimensions, of which some may be reduced to 1, as in
    Adafactor's rows and columns: a step of two elements per dimension shows which.

    Args:
        optimizer: A plain optimizer; it is not changed.
        param: Only its shape and dtype are read.
        group: The options of the step.

    Returns:
        State name -> shape, without single numbers; empty for an optimizer that is not torch's.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(30, 20))
        >>> adafactor = torch.optim.Adafactor([weight])
        >>> state_shapes(adafactor, weight, adafactor.param_groups[0])
        {'row_var': (30, 1), 'col_var': (1, 20)}
    """
    if type(optimizer) not in SEPARABLE:
        return {}
    small = torch.empty([min(size, 2) for size in param.shape], dtype=param.dtype, device="meta")
    found = {}
    with suppress(Exception):  # of gradients that the optimizer refuses, as SparseAdam does
        for name, value in first_states(optimizer, small, group, "cpu").items():
            if isinstance(value, Tensor) and value.dim():
                sizes = zip(param.shape, small.shape, value.shape, strict=True)
                found[name] = tuple(whole if own == part else own for whole, part, own in sizes)
    return found

"""States that a plain optimizer's first step would make, without data."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def raw_step(optimizer: Optimizer, *args: Callable[[], Any]) -> Any:
    """Run the class's step without hooks and profiler, which belong to the outer step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, *args)


def inner_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper; another optimizer itself.

    The wrapper has the attributes of the inner optimizer.
    """
    inner = getattr(optimizer, "optimizer", None)
    is_inside = isinstance(inner, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks")
    return inner if is_inside else optimizer  # pyright: ignore[reportReturnType]


def without_states(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same kind and groups, without states or hooks.

    Its containers and tensors are copies, except parameters: bitsandbytes' first step moves tables
    of the optimizer to the device of a parameter, which may be `meta`.
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
    """Return the dtype of a parameter's gradients: `grad_dtype`, or the parameter's."""
    return getattr(param, "grad_dtype", None) or param.dtype


def first_states(
    optimizer: Optimizer, param: Tensor, group: dict[str, Any], device: str = "meta"
) -> dict[str, Any]:
    """Return the states that a plain optimizer's first step creates for a parameter.

    Only the parameter's shape, dtype and `grad_dtype` are read; the optimizer is not changed. The
    step runs on `device`, and its errors pass through. The states of a sharded parameter are those
    of the whole.
    """
    like = torch.zeros(param.shape, dtype=param.dtype, device=device, requires_grad=True)
    kind = gradient_dtype(param)
    if kind != like.dtype:
        like.grad_dtype = kind
    like.grad = torch.zeros_like(like, dtype=kind)
    alone = without_states(optimizer)
    # Fused and capturable steps keep the same states, but refuse this device.
    options = {name: False for name in ("foreach", "fused", "capturable") if name in group}
    known = {key: _copied(value, set()) for key, value in group.items() if key != "params"}
    groups = [{**known, **options, "params": [like]}]
    alone.param_groups = groups
    try:
        raw_step(alone)
    except KeyError:  # it makes states when it is made, as Adagrad of torch 2.11 does
        made_by: Any = type(optimizer)  # torch's own take groups alone
        alone = made_by(groups)
        raw_step(alone)
    return dict(alone.state[like])


def first_shapes(
    optimizer: Optimizer, param: Tensor, group: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> shape and dtype of the tensors that an optimizer's first step creates.

    torch's states have the parameter's dimensions, some reduced to 1, as Adafactor's rows and
    columns: a step with at most two elements per dimension shows which. Empty if the step raises.
    """
    sizes = [min(size, 2) for size in param.shape]
    small: Any = torch.empty(sizes, dtype=param.dtype, device="meta")
    if gradient_dtype(param) != param.dtype:
        small.requires_grad_().grad_dtype = gradient_dtype(param)
    states: dict[str, Any] = {}
    with suppress(Exception):  # as SparseAdam for dense gradients
        states = first_states(optimizer, small, group, "cpu")
    found = {}
    for name, value in states.items():
        if isinstance(value, Tensor):
            each = zip(param.shape, sizes, value.shape, strict=False)
            shape = tuple(whole if size == part else size for whole, part, size in each)
            found[name] = shape, value.dtype
    return found

"""From a plain torch optimizer to compressed states and back, at any step of a run."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from memtrain.compressors.base import Compressor
from memtrain.optim import layout
from memtrain.optim.adamw4bit import MOMENTS, AdamW4bit, fused_kind, moment_dtype
from memtrain.optim.base import CompressedStates, on_each
from memtrain.optim.compressed import CompressedOptimizer, refuse

_REFUSED = ("amsgrad", "capturable", "differentiable")


def compress(
    optimizer: Optimizer,
    choose: layout.Choose | None = None,
    *,
    min_elements: int = layout.MIN_ELEMENTS,
) -> CompressedStates:
    """Take over an optimizer: same groups, same hyperparameters, its states compressed.

    A torch AdamW or Adam becomes `AdamW4bit` where each parameter's choice has a fused kernel;
    everything else, and options that `AdamW4bit` lacks (amsgrad, capturable), becomes a
    `CompressedOptimizer`. The list of parameter groups is shared with the original, so LR
    schedulers made before keep working. Keep using the returned optimizer; `restore` gives the
    original back.

    Args:
        optimizer: A torch optimizer.
        choose: `(parameter, state name) -> compressor`, `Identity()` to keep a state exact; by
            default the paper's: B128/DE and Rank-1/Linear.
        min_elements: Parameters of at most so many elements keep exact states.

    Returns:
        The optimizer to use from now on.

    Raises:
        TypeError: If the optimizer cannot have compressed states (LBFGS), or has them already.
        ValueError: If it is differentiable: compressed states have no gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(100, 100))
        >>> type(compress(torch.optim.AdamW([weight]))).__name__
        'AdamW4bit'
    """
    refuse(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("differentiable=True is refused: compressed states have no gradient")
    choose = Bounded(choose or layout.Choice(min_elements=0), min_elements)
    if not becomes_fused(optimizer, choose):
        return CompressedOptimizer(optimizer, choose, min_elements=min_elements)
    new = AdamW4bit.taking_over(optimizer, choose)
    states = {p: _pack_moments(new, p, state) for p, state in optimizer.state.items() if state}
    new.adopt(optimizer)
    new.state.update(states)
    return new


class Bounded:
    """`choose`, with `Identity` for small parameters; a class so that it pickles."""

    def __init__(self, choose: layout.Choose, min_elements: int) -> None:
        self.choose, self.min_elements = choose, min_elements

    def __call__(self, param: Tensor, state_name: str) -> Compressor | str:
        """The choice, or the reason to keep a small parameter's states."""
        if (numel := param.numel()) <= self.min_elements:
            return f"kept: {numel} elements <= min_elements {self.min_elements}"
        return self.choose(param, state_name)


def becomes_fused(optimizer: Optimizer, choose: layout.Choose) -> bool:
    """Whether `compress` makes an `AdamW4bit` of this optimizer."""
    if type(optimizer) not in (Adam, AdamW):
        return False
    if any(group.get(name) for group in optimizer.param_groups for name in _REFUSED):
        return False
    kinds = set()
    for param, _, _ in on_each(optimizer.param_groups):
        first, second = (layout.decide(param, choose(param, name))[0] for name in MOMENTS)
        kinds.add("exact" if param.is_complex() else fused_kind(first, second))
    # All exact: torch's own step then keeps the run bit-identical to the plain one.
    return None not in kinds and kinds != {"exact"} and bool(kinds)


def _pack_moments(new: AdamW4bit, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    packed: dict[str, Any] = {"step": torch.as_tensor(state["step"]).detach().float().cpu().clone()}
    for name in MOMENTS:
        value = state[name].detach().to(moment_dtype(param)).contiguous()
        packed[name] = layout.pack(new.compressor(param, name)[0], value)
    return packed


def restore(optimizer: Optimizer) -> Optimizer:
    """The plain torch optimizer back, with its states decompressed into it.

    Args:
        optimizer: What `compress` (or the user) made; a plain optimizer is returned as it is.

    Returns:
        The original object; for an `AdamW4bit` that never had one, a new `torch.optim.AdamW` (or
        `Adam`, without decoupled weight decay) over the same groups.

    Example:
        >>> original = torch.optim.AdamW([torch.nn.Parameter(torch.ones(100, 100))])
        >>> restore(compress(original)) is original
        True
    """
    if not isinstance(optimizer, CompressedStates):
        return optimizer
    original = optimizer.give_back() or _plain(optimizer)
    for param, group, _ in on_each(optimizer.param_groups):
        if not optimizer.state.get(param):
            continue
        if isinstance(optimizer, CompressedOptimizer):
            original.state[param] = optimizer.unpacked(param)
        else:
            original.state[param] = _whole_moments(optimizer, param, group)
        del optimizer.state[param]
    return original


def _plain(optimizer: CompressedStates) -> Optimizer:
    decoupled = all(g.get("decoupled_weight_decay", True) for g in optimizer.param_groups)
    params = [p for p, _, _ in on_each(optimizer.param_groups)]
    original = (AdamW if decoupled else Adam)(params)
    for group in optimizer.param_groups:
        for name, value in original.defaults.items():
            group.setdefault(name, value)
    original.param_groups = optimizer.param_groups
    return original


def _whole_moments(
    optimizer: CompressedStates, param: Tensor, group: dict[str, Any]
) -> dict[str, Any]:
    state = optimizer.state[param]
    step = state["step"]
    if group.get("fused") or group.get("capturable"):
        step = step.to(param.device)
    whole = {"step": step}
    for name in MOMENTS:
        moment = layout.unpack(optimizer.compressor(param, name)[0], state[name], param)
        whole[name] = torch.empty_like(param).copy_(moment)
    return whole

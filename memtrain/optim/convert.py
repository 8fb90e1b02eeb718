"""Conversion of optimizers and checkpoints between plain and compressed states."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.optim.fused.adam import Adam4bit, Adam8bit, AdamW4bit, AdamW8bit
from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.fused.lion import Lion4bit, Lion8bit
from memtrain.optim.fused.payloads import counter_dtype, moment_dtype
from memtrain.optim.fused.sgd import SGD4bit, SGD8bit
from memtrain.optim.states import layout
from memtrain.optim.states.checkpoint_options import numbered
from memtrain.optim.states.compressed import CompressedOptimizer, refuse
from memtrain.optim.states.compressed_states import KEY, CompressedStates, on_each
from memtrain.optim.states.known_optimizers import default_choice
from memtrain.optim.states.optimizer_hooks import innermost

FUSED: dict[tuple[type[Optimizer], int], type[FusedStates]] = {
    (kind.plain, kind.bits): kind
    for kind in (AdamW4bit, AdamW8bit, Adam4bit, Adam8bit, SGD4bit, SGD8bit, Lion4bit, Lion8bit)
}
"""Class of a plain optimizer and bits -> the fused class that `compress` returns."""


def compress(
    optimizer: Optimizer,
    choose: layout.Choose | None = None,
    *,
    min_elements: int = layout.MIN_ELEMENTS,
) -> CompressedStates:
    """Return an optimizer with the same groups and compressed states.

    torch's AdamW, Adam and SGD and memtrain's `Lion` become fused optimizers (`AdamW4bit`; with
    compressors of 8 bits `AdamW8bit`) if the chosen compressors have a fused kernel. Others, and
    options without a kernel (amsgrad), become a `CompressedOptimizer`. The groups are shared with
    the original, so its LR schedulers keep working. `restore` returns the original.

    Args:
        optimizer: A torch optimizer.
        choose: `(parameter, state name) -> compressor`, `Identity()` to keep a state exact. By
            default B128/DE (Lion: B128/Power-1.5) and Rank-1/Linear, and `Identity` for an
            optimizer that memtrain does not know.
        min_elements: Parameters with at most this many elements keep exact states.

    Returns:
        The optimizer to use from now on.

    Raises:
        TypeError: If the optimizer cannot have compressed states (LBFGS), or has them already.
        ValueError: If it is differentiable or capturable.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(100, 100))
        >>> type(compress(torch.optim.AdamW([weight]))).__name__
        'AdamW4bit'
    """
    refuse(optimizer)
    if choose is not None and not callable(choose):
        raise TypeError(
            f"choose={choose!r}; allowed: a function of a parameter and a state's name; "
            "memtrain.wrap(model, optimizer, cfg) takes presets"
        )
    choose = choose or default_choice(optimizer)
    kind = becomes_fused(optimizer, choose, min_elements)
    if kind is None:
        return CompressedOptimizer(optimizer, choose, min_elements=min_elements)
    new = kind([{"params": group["params"]} for group in optimizer.param_groups])  # pyright: ignore[reportCallIssue]
    new.choose, new.min_elements = choose, min_elements
    for group in optimizer.param_groups:
        new.check(group)
    states = {p: _packed(new, p, state) for p, state in optimizer.state.items() if state}
    new.adopt(optimizer)
    new.state.update(states)
    return new


def becomes_fused(
    optimizer: Optimizer, choose: layout.Choose, min_elements: int
) -> type[FusedStates] | None:
    """Return the fused class that `compress` makes of this optimizer, or None."""
    four = FUSED.get((type(optimizer), 4))
    if four is None or any(g.get("amsgrad") for g in optimizer.param_groups):
        return None
    widths = set()
    for param, _, _ in on_each(optimizer.param_groups):
        decided = [layout.decide(param, choose, name, min_elements) for name in four.names]
        compressors = [compressor for compressor, _ in decided]
        # The substitute for a compressor that does not fit the shape may have no kernel with the
        # other state: such a parameter is stepped separately; others keep their kernels.
        separate = any(why and not compressor.is_identity for compressor, why in decided)
        separate = separate and not any(compressor.fused_only for compressor in compressors)
        if four.codecs(compressors) is None and not separate:
            return None
        widths |= {compressor.bits for compressor in compressors}
    # All exact: torch's own step then keeps the run bit-identical to the plain one.
    if widths <= {None}:
        return None
    return FUSED[type(optimizer), 8] if 8 in widths else four


def _packed(new: FusedStates, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step":
            packed[name] = torch.as_tensor(value).detach().to("cpu", counter_dtype(), copy=True)
        elif name in new.names and value is not None:
            packed[name] = new.load_plain(param, name, value)
    return packed


def restore(optimizer: Optimizer) -> Optimizer:
    """Return the plain torch optimizer with its states decompressed.

    Args:
        optimizer: An optimizer with compressed states; a plain optimizer is returned as it is.

    Returns:
        The object that `compress` was called with, or a new plain optimizer over the same groups:
        `torch.optim.AdamW`, `Adam` (without decoupled weight decay), `SGD`, or `Lion`.

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
            original.state[param].pop(layout.STEP, None)
        else:
            original.state[param] = _whole(optimizer, param, group)
        del optimizer.state[param]
    return original


def _plain(optimizer: Any) -> Optimizer:
    original = optimizer.plain_class()([p for p, _, _ in on_each(optimizer.param_groups)])
    for group in optimizer.param_groups:
        group.update({**original.defaults, **group})
    original.param_groups = optimizer.param_groups
    return original


def _whole(optimizer: CompressedStates, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    whole = optimizer.unpacked(param)
    for name, value in whole.items():
        if name != "step":
            whole[name] = torch.empty_like(param).copy_(value)
        elif group.get("fused"):
            whole[name] = value.to(param.device)
    return whole


@torch.no_grad()
def portable_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return the `state_dict` of the equivalent plain optimizer, in float32.

    The plain optimizer loads it at any step, and the compressed optimizer loads the plain one's
    `state_dict()`. The states are those that the next step would decompress.

    Args:
        optimizer: An optimizer with compressed states, or its wrapper. The states of a plain
            optimizer are copied.

    Returns:
        Plain dicts of tensors and numbers, without the corrections of split weights.

    Memory:
        The plain optimizer's states in float32 (float64 for float64 parameters), on the parameters'
        devices: 8 bytes per parameter for AdamW.

    Example:
        >>> from memtrain.optim import AdamW4bit
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer = AdamW4bit([weight])
        >>> optimizer.step()
        >>> torch.optim.AdamW([weight]).load_state_dict(portable_state_dict(optimizer))
    """
    saved = optimizer.state_dict()
    saved.pop(KEY, None)
    optimizer = innermost(optimizer)
    states = {
        number: {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in _unpacked(optimizer, param).items()
        }
        for number, param, _ in numbered(optimizer.param_groups, saved)
    }
    groups = [{**_defaults(optimizer), **group} for group in saved["param_groups"]]
    return {**saved, "state": states, "param_groups": groups}


def _unpacked(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    if isinstance(optimizer, CompressedStates):
        return optimizer.unpacked(param, moment_dtype(param))
    return optimizer.state[param]


def _defaults(optimizer: Optimizer) -> dict[str, Any]:
    """Return options of the plain optimizer's groups that a fused optimizer may lack."""
    if not isinstance(optimizer, FusedStates):
        return {}
    probe = optimizer.plain_class()([torch.nn.Parameter(torch.empty(0))])  # pyright: ignore[reportCallIssue]
    return probe.defaults

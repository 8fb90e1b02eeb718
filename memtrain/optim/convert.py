"""From a plain torch optimizer to compressed states and back, itself or its checkpoint."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.compressors.base import Compressor, Keep
from memtrain.optim.fused.adam import Adam4bit, Adam8bit, AdamW4bit, AdamW8bit
from memtrain.optim.fused.fused import REFUSED, FusedStates
from memtrain.optim.fused.lion import Lion4bit, Lion8bit
from memtrain.optim.fused.payloads import counter_dtype, moment_dtype
from memtrain.optim.fused.sgd import SGD4bit, SGD8bit
from memtrain.optim.states import layout
from memtrain.optim.states.compressed import CompressedOptimizer, refuse
from memtrain.optim.states.compressed_states import OWN, CompressedStates, on_each
from memtrain.optim.states.known_optimizers import default_choice
from memtrain.optim.states.optimizer_hooks import innermost

FUSED: dict[tuple[type[Optimizer], int], type[FusedStates]] = {
    (kind.plain, kind.bits): kind
    for kind in (AdamW4bit, AdamW8bit, Adam4bit, Adam8bit, SGD4bit, SGD8bit, Lion4bit, Lion8bit)
}
"""A plain optimizer's class and bits -> the fused one that `compress` makes of it."""


def compress(
    optimizer: Optimizer,
    choose: layout.Choose | None = None,
    *,
    min_elements: int = layout.MIN_ELEMENTS,
) -> CompressedStates:
    """Take over an optimizer: same groups, same hyperparameters, its states compressed.

    A torch AdamW, Adam or SGD, or our `Lion`, becomes its fused form (`AdamW4bit`; with choices of
    8 bits `AdamW8bit`) where each parameter's choice has a fused kernel, or has none but for its
    shape (a weight too small for factors, beside 8 bits, is stepped separately); everything else,
    and options that the fused ones lack (amsgrad), becomes a `CompressedOptimizer`. The list of
    parameter groups is shared with the original, so LR schedulers made before keep working. Keep
    using the returned optimizer; `restore` gives the original back.

    Args:
        optimizer: A torch optimizer.
        choose: `(parameter, state name) -> compressor`, `Identity()` to keep a state exact; by
            default the paper's, B128/DE and Rank-1/Linear; of an optimizer that memtrain does not
            know (`is_tested`), `Identity` for all.
        min_elements: Parameters of at most so many elements keep exact states.

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
    choose = Bounded(choose or default_choice(optimizer, 0), min_elements)
    kind = becomes_fused(optimizer, choose)
    if kind is None:
        return CompressedOptimizer(optimizer, choose, min_elements=min_elements)
    new = kind.taking_over(optimizer, choose)
    states = {p: _packed(new, p, state) for p, state in optimizer.state.items() if state}
    new.adopt(optimizer)
    new.state.update(states)
    return new


class Bounded:
    """`choose`, with `Identity` for small parameters; a class so that it pickles."""

    def __init__(self, choose: layout.Choose, min_elements: int) -> None:
        self.choose, self.min_elements = choose, min_elements
        self.seed = getattr(choose, "seed", 0)
        self.instead = getattr(choose, "instead", None)

    def __call__(self, param: Tensor, state_name: str) -> Compressor | Keep:
        """The choice, or the reason to keep a small parameter's states."""
        why = layout.too_small(param, self.min_elements)
        return Keep(why) if why else self.choose(param, state_name)


def becomes_fused(optimizer: Optimizer, choose: layout.Choose) -> type[FusedStates] | None:
    """The fused class that `compress` makes of this optimizer, or None."""
    four = FUSED.get((type(optimizer), 4))
    if four is None or any(g.get(name) for g in optimizer.param_groups for name in REFUSED):
        return None
    widths = set()
    for param, _, _ in on_each(optimizer.param_groups):
        decided = [layout.decide(param, choose, name) for name in four.names]
        compressors = [compressor for compressor, _ in decided]
        # Where a shape rules the chosen one out, what serves instead may have no kernel beside the
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
            whole = value.detach().to(moment_dtype(param)).contiguous()
            packed[name] = layout.pack(new.compressor(param, name)[0], whole)
    return packed


def restore(optimizer: Optimizer) -> Optimizer:
    """The plain torch optimizer back, with its states decompressed into it.

    Args:
        optimizer: What `compress` (or the user) made; a plain optimizer is returned as it is.

    Returns:
        The original object; for a fused one that never had one, a new plain one over the same
        groups: `torch.optim.AdamW`, `Adam` (without decoupled weight decay), `SGD`, or `Lion`.

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
    params = [p for p, _, _ in on_each(optimizer.param_groups)]
    original = optimizer.plain_class()(params)
    for group in optimizer.param_groups:
        for name, value in original.defaults.items():
            group.setdefault(name, value)
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
    """The `state_dict` of the plain optimizer that a compressed one stands for, in float32.

    `torch.optim.AdamW` (`Adam`, `SGD`, our `Lion`; for a `CompressedOptimizer` the one that it
    holds) loads it, at any step, and the compressed one loads the plain one's `state_dict()`:
    `load_state_dict` compresses what is not compressed. What is lost is what compression had lost
    already: the states are those that the next step would have decompressed.

    Args:
        optimizer: A compressed one (of a plain one its own states are copied), or what `wrap` put
            around it; it is not changed.

    Returns:
        Plain dicts of plain tensors and numbers. Corrections of split weights are no states of a
        plain optimizer, and left out.

    Memory:
        The plain optimizer's states, 8 bytes per parameter for AdamW, in float32 (float64 for
        float64 parameters), on the parameters' devices.

    Example:
        >>> from memtrain.optim import AdamW4bit
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer = AdamW4bit([weight])
        >>> optimizer.step()
        >>> torch.optim.AdamW([weight]).load_state_dict(portable_state_dict(optimizer))
    """
    saved = optimizer.state_dict()
    saved.pop(OWN, None)
    optimizer = innermost(optimizer)
    params = [param for param, _, _ in on_each(optimizer.param_groups)]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    states = {
        index: {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in _unpacked(optimizer, param).items()
        }
        for index, param in zip(order, params, strict=True)
        if index in saved["state"]
    }
    groups = [{**_defaults(optimizer), **group} for group in saved["param_groups"]]
    return {**saved, "state": states, "param_groups": groups}


def _unpacked(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    if isinstance(optimizer, CompressedStates):
        return optimizer.unpacked(param, moment_dtype(param))
    return optimizer.state[param]


def _defaults(optimizer: Optimizer) -> dict[str, Any]:
    """Options that the plain optimizer's groups have and a fused one's may lack."""
    if not isinstance(optimizer, FusedStates):
        return {}
    probe = optimizer.plain_class()([torch.nn.Parameter(torch.empty(0))])  # pyright: ignore[reportCallIssue]
    return probe.defaults

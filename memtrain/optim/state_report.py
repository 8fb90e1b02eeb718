"""Optimizer states' memory: live bytes, and how each state is or will be kept."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtrain.compressors.base import Keep
from memtrain.compressors.identity import Identity
from memtrain.optim.convert import becomes_fused
from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.fused.payloads import moment_dtype
from memtrain.optim.states import layout
from memtrain.optim.states.compressed_states import CompressedStates, on_each
from memtrain.optim.states.first_step import first_states
from memtrain.optim.states.known_optimizers import default_choice
from memtrain.optim.states.optimizer_hooks import innermost
from memtrain.optim.states.shards import local


def state_bytes(optimizer: Optimizer) -> int:
    """Return the live bytes of all state tensors, each storage counted once.

    Example:
        >>> state_bytes(torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))]))
        0
    """
    storages = {}
    for tensor in _tensors(list(optimizer.state.values())):
        storage = local(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def describe(optimizer: Optimizer) -> list[layout.StateRow]:
    """Return how each state of each parameter is stored, or will be after the first step.

    Args:
        optimizer: Any optimizer, wrapped or not. The states of a plain optimizer are kept.

    Returns:
        A row per state without `step` counters: parameter, its name (`group.index` if the groups
        have no names), state, compressor, bytes, and the reason if it is not the chosen one. A
        state that cannot be predicted is missing until the first step.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> from memtrain.optim import AdamW4bit
        >>> [(row.state, row.nbytes) for row in describe(AdamW4bit([weight]))]
        [('exp_avg', 4352), ('exp_avg_sq', 4352)]
    """
    inner = innermost(optimizer)
    if isinstance(inner, CompressedStates):
        pairs = zip(on_each(inner.param_groups), on_each(optimizer.param_groups), strict=True)
        outer = {copy[0]: param[0] for copy, param in pairs}  # states on the host are of copies
        rows = _rows(inner, inner.choose, inner.min_elements)
        return [row._replace(param=outer[row.param]) for row in rows]
    return _rows(optimizer, lambda param, state: Keep("kept: not compressed"), 0)


def predict(
    optimizer: Optimizer,
    choose: layout.Choose | None = None,
    *,
    min_elements: int = layout.MIN_ELEMENTS,
) -> list[layout.StateRow]:
    """Return the rows of `describe(compress(...))` without changing the optimizer.

    The arguments are those of `compress`; parameters may be meta and fake tensors.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(100, 100, device="meta"))
        >>> [row.state for row in predict(torch.optim.SGD([weight], lr=1.0, momentum=0.9))]
        ['momentum_buffer']
    """
    choose = choose or default_choice(optimizer)
    kind = becomes_fused(optimizer, choose, min_elements)
    return _rows(optimizer, choose, min_elements, kind)


def _rows(
    optimizer: Optimizer,
    choose: layout.Choose,
    min_elements: int,
    kind: type[FusedStates] | None = None,
) -> list[layout.StateRow]:
    fused = type(optimizer) if isinstance(optimizer, FusedStates) else kind
    rows = []
    for param, group, name in on_each(optimizer.param_groups):
        for state, value in _values(optimizer, param, group, fused).items():
            if state == "step" or not isinstance(value, Tensor | dict):
                continue
            why = ""
            if fused is None and isinstance(value, Tensor):
                why = layout.eligible(param, value, min_elements)
            compressor, reason = (
                (Identity(), why) if why else layout.decide(param, choose, state, min_elements)
            )
            packed = layout.is_packed(value, compressor.parts)
            if isinstance(value, dict) and not packed:
                compressor, reason = Identity(), "kept: not a tensor"
            if isinstance(value, Tensor) and not compressor.is_identity:
                nbytes = layout.payload_bytes(compressor, local(param).shape, value.dtype)
            else:
                nbytes = sum(local(t).nbytes for t in _tensors(value))
                reason = reason or ("" if packed else "kept: identity was chosen")
            rows.append(layout.StateRow(param, name, state, compressor, nbytes, reason))
    return rows


def _values(
    optimizer: Optimizer, param: Tensor, group: dict[str, Any], fused: type[FusedStates] | None
) -> dict[str, Any]:
    if optimizer.state.get(param):
        return dict(optimizer.state[param])
    if fused is not None:
        like = torch.empty(local(param).shape, dtype=moment_dtype(param), device="meta")
        return dict.fromkeys(fused.state_names(group), like)
    inner = optimizer.original if isinstance(optimizer, CompressedStates) else optimizer
    try:
        return first_states(inner, param, group) if inner is not None else {}
    except (RuntimeError, NotImplementedError, ValueError):
        return {}

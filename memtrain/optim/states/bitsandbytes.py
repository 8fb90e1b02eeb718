"""Checkpoints of bitsandbytes' optimizers, read as plain float32 states."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.compressors.registry import state_parts
from memtrain.optim.states.first_step import first_names
from memtrain.optim.states.layout import is_packed
from memtrain.optim.states.optimizer_hooks import innermost
from memtrain.optim.states.shards import local

BITSANDBYTES = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adagrad": ("sum",),
    "Lion": ("exp_avg",),
    "RMSprop": ("square_avg",),
    "SGD": ("momentum_buffer",),
}
"""Plain optimizer -> its names of bitsandbytes' `state1` and `state2`, which mean the same."""
_UNCOUNTED = ("Lion", "SGD")
_NESTED = "__bnb_optimizer_quant_state__"  # since 0.49, so that FSDP leaves them alone
_BLOCKS = (256, 2048)  # 2048 before 0.44


def plain_states(
    values: dict[str, Any],
    plain: str,
    param: Tensor,
    has: Callable[[], Collection[str] | None] = lambda: None,
) -> dict[str, Any]:
    """States of one parameter in a checkpoint as a plain optimizer has them.

    bitsandbytes' are 8 bits in blocks (the map's value of a code times its block's `absmax`) or 32.
    What is plain stays.

    Args:
        values: Name -> value, as the library's `state_dict()` holds them.
        plain: Name of the plain optimizer that loads them: bitsandbytes' states have none.
        param: The parameter.
        has: Gives the names of the states that such a parameter has there, or None if they are not
            known; asked for another library's states only.

    Returns:
        Names as torch's own; tensors that were codes are float32. `values` itself if it is plain.

    Raises:
        ValueError: If states are of another optimizer, of another shape, lack scales, are quantised
            without blocks, or are tensors of another library's class (torchao's).

    Example:
        >>> saved = {"step": 3, "state1": torch.tensor([1, 0], dtype=torch.uint8),
        ...          "qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.tensor([2.0])}
        >>> plain_states(saved, "SGD", torch.empty(2))
        {'momentum_buffer': tensor([-1.9843, -2.0000])}

    Reference:
        bitsandbytes 0.50 (optim/optimizer.py), whose format this is.
    """
    for name, value in values.items():
        if hasattr(local(value), "dequantize") and type(local(value)) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"state {name!r} is a {type(local(value)).__name__} of another library; allowed: "
                "plain tensors, such as its dequantize(torch.float32)"
            )
    if _NESTED not in values and "state1" not in values:
        return values
    found = _of_bitsandbytes(values, plain, param.shape)
    wanted, own = has(), found.keys() - {"step"}
    if wanted is not None and own != {*wanted} - {"step"}:
        allowed = [kind for kind, names in BITSANDBYTES.items() if own == {*names}]
        raise ValueError(
            f"bitsandbytes' states {sorted(own)} for {plain}, which has {sorted({*wanted})} with "
            f"these options; allowed: {', '.join(allowed) or 'the optimizer that they are of'}"
        )
    return found


def read_by(optimizer: Optimizer) -> Any:
    """Let a plain optimizer load bitsandbytes' states, as the float32 ones they stand for.

    Args:
        optimizer: Of `torch.optim`'s kind.

    Returns:
        The handle of a hook before its `load_state_dict`, which optimizers around it run too.
    """
    return optimizer.register_load_state_dict_pre_hook(_as_plain)


def _as_plain(optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    optimizer = innermost(optimizer)
    kind, states = type(optimizer).__name__, dict(loaded["state"])
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=False):
        for number, param in zip(saved["params"], group["params"], strict=False):

            def has(param: Tensor = param, options: Any = (group, saved)) -> Any:
                return first_names(optimizer, param, {**options[0], **options[1]})

            if number in states:
                states[number] = plain_states(states[number], kind, param, has)
                _refuse_payloads(states[number], kind, param)
    return {**loaded, "state": states}


def _refuse_payloads(values: dict[str, Any], kind: str, param: Tensor) -> None:
    known = state_parts()
    for name, value in values.items():
        if is_packed(value, known):
            raise ValueError(
                f"state {name!r} of a parameter of shape {tuple(param.shape)} holds the payload "
                f"{sorted(value)}, but the states of this {kind} are plain: load it under the "
                "config that saved it; memtrain.optim.portable_state_dict then gives one for any"
            )


def _of_bitsandbytes(values: dict[str, Any], plain: str, shape: torch.Size) -> dict[str, Any]:
    values = {**values, **values.get(_NESTED, {})}
    values.pop(_NESTED, None)
    if plain not in BITSANDBYTES:
        allowed = ", ".join(BITSANDBYTES)
        raise ValueError(f"bitsandbytes' states for {plain}; allowed: {allowed}")
    names = BITSANDBYTES[plain]
    numbers = range(1, len(names) + 1)
    known = {"step", *(f"{part}{k}" for part in ("state", "qmap", "absmax") for k in numbers)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"bitsandbytes' states have {unknown}, and {plain} does not; allowed: {sorted(known)}"
        )
    if missing := [f"state{k}" for k in numbers if f"state{k}" not in values]:
        raise ValueError(f"bitsandbytes' states lack {missing}, which {plain} has")
    counter = {} if plain in _UNCOUNTED else {"step": torch.tensor(float(values["step"]))}
    return {
        **counter,
        **{name: _decoded(values, k, shape) for k, name in zip(numbers, names, strict=True)},
    }


def _decoded(values: dict[str, Any], number: int, shape: torch.Size) -> Tensor:
    codes = values[f"state{number}"]
    if codes.shape != shape:
        raise ValueError(
            f"bitsandbytes' state{number} has shape {tuple(codes.shape)}; allowed: {tuple(shape)}"
        )
    if codes.dtype != torch.uint8:
        return codes.float()
    table, scale = (values.get(f"{part}{number}") for part in ("qmap", "absmax"))
    blocks = {size: -(-codes.numel() // size) for size in _BLOCKS}
    block = None if scale is None else {n: size for size, n in blocks.items()}.get(scale.numel())
    if table is None or table.numel() != 256 or scale is None or block is None:
        found = {"qmap": table, "absmax": scale}
        found = {name: None if t is None else t.numel() for name, t in found.items()}
        raise ValueError(
            f"bitsandbytes' state{number} of {codes.numel()} codes has {found}; allowed: a qmap of "
            f"256, and an absmax of {' or '.join(map(str, blocks.values()))}"
        )
    whole = table.float()[codes.long()].reshape(-1)
    return (whole * scale.float().repeat_interleave(block)[: whole.numel()]).view(shape)

"""Checkpoints of other libraries' optimizers, read as plain float32 states."""

from typing import Any

import torch
from torch import Tensor

from memtrain.optim.states import flashoptim

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


def plain_states(values: dict[str, Any], plain: str, shape: torch.Size) -> dict[str, Any]:
    """States of one parameter in a checkpoint as a plain optimizer has them.

    FlashOptim's (`flashoptim.plain_states`), bitsandbytes' (8 bits in blocks: the map's value of a
    code times its block's `absmax`; and its 32-bit ones) and torchao's (8, 4 bits and FP8: tensors
    of its own classes, which say themselves what they stand for). What is plain stays.

    Args:
        values: Name -> value, as the library's `state_dict()` holds them.
        plain: Name of the plain optimizer that loads them: bitsandbytes' states have none.
        shape: The parameter's.

    Returns:
        Names as torch's own; tensors that were codes are float32.

    Raises:
        ValueError: If states are of another optimizer, of another shape, quantised in another way
            (bitsandbytes' without blocks) or torchao's split over processes.

    Example:
        >>> saved = {"step": 3, "state1": torch.tensor([1, 0], dtype=torch.uint8),
        ...          "qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.tensor([2.0])}
        >>> plain_states(saved, "SGD", torch.Size([2]))
        {'momentum_buffer': tensor([-1.9843, -2.0000])}

    Reference:
        bitsandbytes 0.50 (optim/optimizer.py) and torchao 0.18 (optim/subclass_8bit.py, _4bit.py,
        _fp8.py), whose formats these are.
    """
    if flashoptim.is_flash(values):
        return flashoptim.plain_states(values)
    if _NESTED in values or "state1" in values:
        return _of_bitsandbytes(values, plain, shape)
    return {name: _of_torchao(name, value) for name, value in values.items()}


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
            f"bitsandbytes' states hold {unknown}, which {plain} has not; allowed: {sorted(known)}"
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


def _of_torchao(name: str, value: Any) -> Any:
    codes = getattr(getattr(value, "_local_tensor", value), "codes", None)
    if not isinstance(codes, Tensor):
        return value
    if not hasattr(value, "codes"):
        raise ValueError(
            f"state {name!r} is torchao's, split over processes; allowed: whole tensors "
            "(torch.distributed.checkpoint's get_optimizer_state_dict with full_state_dict=True)"
        )
    return value.dequantize(torch.float32)

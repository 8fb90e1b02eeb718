"""Checkpoints of FlashOptim's optimizers, read as plain float32 states."""

import warnings
from typing import Any

import torch
from torch import Tensor

CODES, SCALES, ERRORS = "::quantized", "::scales", "error_bits"
GROUP = 32  # elements that share a scale


def is_flash(values: dict[str, Any]) -> bool:
    """Whether a parameter's states in a checkpoint are FlashOptim's own form."""
    return any(name == ERRORS or name.endswith(CODES) for name in values)


def plain_states(values: dict[str, Any]) -> dict[str, Any]:
    """FlashOptim's states of one parameter as plain ones.

    Signed states are int8 codes `q`: with `y = q / 127` the value is `y / (2 - |y|)` times the
    scale of its 32 neighbours; second moments are uint8 codes of the square root. Scales are
    float16, stored as bfloat16 of the same bits for bfloat16 parameters. What is plain already
    stays. `error_bits`, the weights' lower bits, are left out with a warning: export FlashOptim's
    float32 weights and load those.

    Args:
        values: Name -> value, as its `state_dict()` holds them.

    Returns:
        Names as torch's own, tensors float32 of the codes' shape.

    Raises:
        ValueError: If codes have no scales, or too few.

    Example:
        >>> saved = {"exp_avg::quantized": torch.tensor([127, -127, 0], dtype=torch.int8),
        ...          "exp_avg::scales": torch.tensor([0.5], dtype=torch.float16)}
        >>> plain_states(saved)["exp_avg"]
        tensor([ 0.5000, -0.5000,  0.0000])

    Reference:
        FlashOptim 0.1.4, whose formats these are: github.com/databricks/flashoptim.
    """
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name == ERRORS:
            warnings.warn(
                "the checkpoint holds error_bits, corrections of weights: they are left out; "
                "export FlashOptim's weights with get_fp32_model_state_dict() and load those",
                RuntimeWarning,
                stacklevel=2,
            )
        elif name.endswith(CODES):
            state = name.removesuffix(CODES)
            plain[state] = _decoded(state, value, values.get(state + SCALES))
        elif not name.endswith(SCALES):
            plain[name] = value.float() if name == "step" else value
    return plain


def _decoded(state: str, codes: Tensor, scales: Tensor | None) -> Tensor:
    groups = -(-codes.numel() // GROUP)
    if scales is None or scales.numel() != groups:
        found = "no scales" if scales is None else f"{scales.numel()} scales"
        raise ValueError(
            f"state {state!r} of shape {tuple(codes.shape)} has {found}; needed: {groups}"
        )
    if scales.dtype == torch.bfloat16:
        scales = scales.view(torch.float16)
    scale = scales.float().reshape(-1).repeat_interleave(GROUP)[: codes.numel()].view(codes.shape)
    if codes.dtype == torch.uint8:
        return (codes / 255 * scale).square()
    y = codes / 127
    return y / (2 - y.abs()) * scale

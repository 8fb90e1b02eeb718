"""Checkpoints that a plain optimizer loads."""

from typing import Any

import torch
from torch import Tensor

from memtrain.optim.fused.fused import FusedStates, moment_dtype
from memtrain.optim.states import layout
from memtrain.optim.states.compressed_states import OWN, CompressedStates, on_each


@torch.no_grad()
def portable_state_dict(optimizer: CompressedStates) -> dict[str, Any]:
    """The `state_dict` of the plain optimizer that a compressed one stands for, in float32.

    `torch.optim.AdamW` (`Adam`, `SGD`, our `Lion`; for a `CompressedOptimizer` the one that it
    holds) loads it, at any step, and the compressed one loads the plain one's `state_dict()`:
    `load_state_dict` compresses what is not compressed. What is lost is what compression had lost
    already: the states are those that the next step would have decompressed.

    Args:
        optimizer: A compressed one; it is not changed.

    Returns:
        Plain dicts of plain tensors and numbers.

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
    params = [param for param, _, _ in on_each(optimizer.param_groups)]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    states = {
        index: _whole(optimizer, param)
        for index, param in zip(order, params, strict=True)
        if index in saved["state"]
    }
    groups = [{**_defaults(optimizer), **group} for group in saved["param_groups"]]
    return {**saved, "state": states, "param_groups": groups}


def _whole(optimizer: CompressedStates, param: Tensor) -> dict[str, Any]:
    whole = {}
    for name, value in optimizer.state[param].items():
        if isinstance(optimizer, CompressedStates) and optimizer.is_payload(param, name, value):
            value = layout.unpack(
                optimizer.compressor(param, name)[0], value, param, moment_dtype(param)
            )
        whole[name] = value.clone() if isinstance(value, Tensor) else value
    return whole


def _defaults(optimizer: CompressedStates) -> dict[str, Any]:
    """Options that the plain optimizer's groups have and a fused one's may lack."""
    if not isinstance(optimizer, FusedStates):
        return {}
    probe = optimizer.plain_class()([torch.nn.Parameter(torch.empty(0))])  # pyright: ignore[reportCallIssue]
    return probe.defaults

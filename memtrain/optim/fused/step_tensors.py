"""Inputs of an optimizer step: gradients, states and the signature of its kernel tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels import dispatch
from memtrain.kernels.step.split import NO_MASTER
from memtrain.optim.fused.payloads import as_payload, real_view
from memtrain.optim.states.shards import USUAL, local
from memtrain.optim.states.targets import Part, Target


def tensors_of(
    parts: Sequence[Part], names: Sequence[tuple[str, ...]], states: Mapping[Tensor, Any]
) -> tuple[list[Any], tuple[Any, ...]] | None:
    """Collect the tensors of a step, in the order of the groups.

    `names` are those of the states per group, in the order of the optimizer's codecs. Returns a
    signature, which is equal for steps whose kernel tables differ only in `Inputs`; and the values
    of `Inputs` after the scalars. Returns None without a gradient, or if a state is missing.
    """
    found = [
        _tensors(target, state_names, states.get(target.param) or {})
        for (_, targets), state_names in zip(parts, names, strict=True)
        for target in targets
    ]
    if not found or None in found:
        return None
    signatures, grads, payloads, masters, guards = zip(*found, strict=True)
    signature = [signatures[0][0], dispatch.forced, *signatures]
    seeds = [master.seed for master in masters] if {*masters} != {NO_MASTER} else ()
    return signature, (grads, payloads, seeds, guards if any(g is not None for g in guards) else ())


def _tensors(target: Target, names: tuple[str, ...], state: dict[str, Any]) -> Any:
    """Return one parameter's part of a signature, its gradient, payloads, master and guard.

    Plain statements: released gradients ask for each parameter.
    """
    param, grad, guard, master = target
    if grad.layout is not torch.strided:
        return None
    payloads, tensors = [], []
    for name in names:
        payload = state.get(name)
        if type(payload) is not dict:
            payload = as_payload(payload)
            if payload is None:
                return None
        payloads.append(payload)
        tensors += payload.values()
    kind: Any = None
    if master is not NO_MASTER:
        kind = master.mode, master.is_contiguous()
        tensors += () if master.correction is None else (master.correction,)
    if type(param) not in USUAL or param.is_complex():
        param, grad = real_view(local(param)), real_view(grad)
    signature = (
        id(target.param),
        names,
        *(param.data_ptr(), param.dtype, param.shape, param.is_contiguous()),
        *(grad.data_ptr() & 15, grad.dtype, grad.device, grad.is_contiguous()),
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.numel, tensors),
        guard is None,
        kind,
    )
    return signature, grad, payloads, master, guard

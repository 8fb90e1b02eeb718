"""Inputs of an optimizer step: gradients, states and the cache key."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.kernels import dispatch
from memtrain.kernels.step.codecs import Payload
from memtrain.kernels.step.split import MasterWeight
from memtrain.optim.fused.payloads import as_payload, real_view
from memtrain.optim.states.shards import USUAL, local
from memtrain.optim.states.targets import Part

_PAYLOAD, _DENSE = {dict}, {torch.strided}


class StepTensors(NamedTuple):
    """The tensors of a step, one value per parameter, in the order of the groups."""

    first: int
    """The identity of the first parameter: `PreparedSteps` keeps the step under it."""
    signature: list[Any]
    """Equal for steps with equal kernel tables."""
    grads: list[Tensor]
    states: list[tuple[Payload, ...]]
    seeds: list[int]
    guards: Sequence[Tensor | None]
    """As in `Inputs`."""


def tensors_of(
    parts: Sequence[Part], names: Sequence[tuple[str, ...]], states: Mapping[Tensor, Any]
) -> StepTensors | None:
    """Collect the tensors of a step.

    Args:
        parts: Parameters with their gradients of this process.
        names: Names of the states per group, in the order of the optimizer's codecs.
        states: The optimizer's states, by parameter.

    Returns:
        None if no parameter has a gradient, or if a state is missing: such a step is prepared
        tensor by tensor.
    """
    signature: list[Any] = [dispatch.forced]
    grads, found, seeds, guards = [], [], [], []
    for (_, targets), own_names in zip(parts, names, strict=True):
        if not {target.grad.layout for target in targets} <= _DENSE:
            return None
        for param, grad, guard, master in targets:
            state = states.get(param, {})
            payloads = [state.get(name) for name in own_names]
            if not {*map(type, payloads)} <= _PAYLOAD:
                payloads = [*map(as_payload, payloads)]
                if None in payloads:
                    return None
            signature += (id(param), own_names, guard is None)
            if type(param) not in USUAL or param.dtype.is_complex:
                param, grad = real_view(local(param)), real_view(grad)
            _add_row(signature, param, grad, payloads, master)
            grads.append(grad)
            found.append(payloads)
            seeds.append(master.seed)
            guards.append(guard)
    if not grads:
        return None
    first = signature[1]
    guarded = guards if any(guard is not None for guard in guards) else ()
    return StepTensors(first, signature, grads, found, seeds, guarded)


def _add_row(
    signature: list[Any],
    param: Tensor,
    grad: Tensor,
    payloads: Sequence[Payload],
    master: MasterWeight,
) -> None:
    """Add what a row of the kernels' table depends on, but for `Inputs`.

    The list is flat: the garbage collector would count a tuple for each parameter.
    """
    signature += (
        param.data_ptr(),
        param.dtype,
        param.shape,
        param.is_contiguous(),
        param.device,
        grad.dtype,
        grad.shape,
        grad.is_contiguous(),
        grad.data_ptr() & 15,
        master.stochastic,
    )
    for payload in payloads:
        for name, x in payload.items():
            signature += (name, x.data_ptr(), x.numel())
    if master.correction is not None:
        kept = master.correction
        signature += (kept.dtype, kept.data_ptr(), kept.numel(), kept.is_contiguous())

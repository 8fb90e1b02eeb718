"""Inputs of an optimizer step: parameters, gradients, states and the cache key."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.kernels import cpu
from memtrain.kernels.step.prepared import signature
from memtrain.kernels.step.split import NO_MASTER, MasterWeight
from memtrain.optim.fused.payloads import as_payload
from memtrain.optim.states.shards import local, local_gradient, shard_of

USUAL = {nn.Parameter, Tensor}
"""Types of tensors that are not sharded, and no other subclass."""
_DENSE = {torch.strided}


class StepTensors:
    """The parameters of a step that have a gradient, with the tensors that the step reads.

    Attributes:
        params: In the order of their groups.
        grads: This process's parts of their gradients.
        states: Each parameter's states.
        names: Names of the states per group, in the order of the optimizer's codecs.
        counts: Parameters per group.
        seeds: As in `Inputs`.
        guards: As in `Inputs`.
        signature: Cache key: equal for steps with equal kernel tables.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    names: Sequence[tuple[str, ...]]
    counts: list[int]
    seeds: list[int]
    guards: list[Tensor | None]
    signature: list[Any]

    @property
    def first(self) -> int:
        """The identity of the first parameter: `PreparedSteps` keeps the step under it."""
        return id(self.params[0])

    def count(self) -> list[float] | None:
        """Increment the step counters; None unless all are float32 tensors on the host."""
        counters = [state.get("step") for state in self.states]
        steps = [x for x in counters if isinstance(x, Tensor)]
        usual = len(steps) == len(counters) and all(x.is_cpu for x in steps)
        if not usual or {x.dtype for x in steps} != {torch.float32} or cpu.library() is None:
            return None
        if len(steps) == 1:  # a released gradient's: a table of one takes longer
            return [float(steps[0].add_(1).numpy())]
        addresses = torch.from_numpy(np.array([*map(Tensor.data_ptr, steps)]))
        counts = torch.empty(len(steps), dtype=torch.float32, device="cpu")
        cpu.call("mt_count_step", addresses, counts, len(counts))
        return counts.tolist()

    def payloads(self) -> list[tuple[dict[str, Tensor], ...]]:
        """Each parameter's payloads, in the order of the optimizer's codecs."""
        names = chain.from_iterable(
            [own] * count for own, count in zip(self.names, self.counts, strict=True)
        )
        return [
            tuple([as_payload(state[name]) for name in own])
            for state, own in zip(self.states, names, strict=True)
        ]


def tensors_of(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[tuple[str, ...]],
    states: Mapping[Tensor, Any],
    masters: Mapping[Tensor, MasterWeight],
    guards: Mapping[Tensor, Tensor],
) -> StepTensors | None:
    """Collect the tensors of a step.

    Args:
        groups: The optimizer's groups.
        names: Names of the states per group.
        states: The optimizer's states, by parameter.
        masters: How the masters of 16-bit parameters are stored.
        guards: Parameter -> its guard.

    Returns:
        None if no parameter has a gradient, if a tensor is sparse, complex or of an unknown type,
        or if a state is missing: such a step is prepared tensor by tensor.
    """
    found = StepTensors()
    each = [[p for p in group["params"] if p.grad is not None] for group in groups]
    params = found.params = [*chain.from_iterable(each)]
    found.names, found.counts = names, [*map(len, each)]
    grads: list[Any] = [p.grad for p in params]
    if not params or not {x.layout for x in grads} <= _DENSE:
        return None
    found.states = own_states = [states.get(p) for p in params]  # pyright: ignore[reportAttributeAccessIssue]
    if any(names) and not {*map(type, own_states)} <= {dict}:
        return None
    parts, own, shards = [], params, []
    if not {*map(type, chain(params, grads))} <= USUAL:
        if any(p.is_complex() for p in params):
            return None
        own, grads = [*map(local, params)], [*map(local_gradient, params)]
        shards = [shard_of(p) is not None for p in params]
    found.grads = grads
    if any(p.is_complex() for p in own):
        return None
    kept = [masters.get(p, NO_MASTER) for p in params] if masters else []
    found.seeds = [master.seed for master in kept]
    found.guards = [guards.get(p) for p in params] if guards else []
    values = [*chain.from_iterable(state.values() for state in own_states if state)]
    payloads = [value for value in values if type(value) is dict]
    tensors = [value for value in values if type(value) is not dict]
    tensors = [local(value) for value in tensors if isinstance(value, Tensor)]
    tensors += chain.from_iterable(map(dict.values, payloads))
    for master in kept:
        parts += [] if master.correction is None else [master.correction]
    more = [
        [*map(id, params)],
        [*names],
        found.counts,
        [*map(type, values)],
        [len(state or ()) for state in own_states],
        [*map(len, payloads)],
        [*chain.from_iterable(chain([state or () for state in own_states], payloads))],
        [master.mode for master in kept],
        [guard is not None for guard in found.guards],
        shards,
    ]
    found.signature = signature(own, grads, [*tensors, *parts], more)
    return found

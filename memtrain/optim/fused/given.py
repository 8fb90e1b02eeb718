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


class Given:
    """The parameters of a step that have a gradient, and what else it reads and writes.

    Attributes:
        params: In the order of their groups.
        grads: This process's parts of their gradients.
        states: Of each parameter.
        names: Of each parameter's states, in the order of the optimizer's codecs.
        counts: How many of each group.
        seeds: As `Inputs` has them.
        guards: As `Inputs` has them.
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
        """The identity of the first parameter, under which `PreparedSteps` keeps the step."""
        return id(self.params[0])

    def count(self) -> list[float] | None:
        """Count a step of each parameter whose counter is a float32 of the host; None elsewhere."""
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


def given_to(
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[tuple[str, ...]],
    states: Mapping[Tensor, Any],
    masters: Mapping[Tensor, MasterWeight],
    guards: Mapping[Tensor, Tensor],
) -> Given | None:
    """What a step works on.

    Args:
        groups: The optimizer's.
        names: Of the states, of each group.
        states: Its states, by parameter.
        masters: How some parameters' masters are kept.
        guards: Of some parameters.

    Returns:
        None where no parameter has a gradient, and where a tensor is sparse, complex or of an
        unknown type, or a state is missing: such a step is looked at tensor by tensor.
    """
    given = Given()
    each = [[p for p in group["params"] if p.grad is not None] for group in groups]
    params = given.params = [*chain.from_iterable(each)]
    given.names, given.counts = names, [*map(len, each)]
    grads: list[Any] = [p.grad for p in params]
    if not params or not {x.layout for x in grads} <= _DENSE:
        return None
    given.states = found = [states.get(p) for p in params]  # pyright: ignore[reportAttributeAccessIssue]
    if any(names) and not {*map(type, found)} <= {dict}:
        return None
    parts, own, shards = [], params, []
    if not {*map(type, chain(params, grads))} <= USUAL:
        if any(p.is_complex() for p in params):
            return None
        own, grads = [*map(local, params)], [*map(local_gradient, params)]
        shards = [shard_of(p) is not None for p in params]
    given.grads = grads
    if any(p.is_complex() for p in own):
        return None
    kept = [masters.get(p, NO_MASTER) for p in params] if masters else []
    given.seeds = [master.seed for master in kept]
    given.guards = [guards.get(p) for p in params] if guards else []
    values = [*chain.from_iterable(state.values() for state in found if state)]
    payloads = [value for value in values if type(value) is dict]
    tensors = [value for value in values if type(value) is not dict]
    tensors = [local(value) for value in tensors if isinstance(value, Tensor)]
    tensors += chain.from_iterable(map(dict.values, payloads))
    for master in kept:
        parts += [x for x in (master.correction,) if x is not None]
    more = [
        [*map(id, params)],
        [*names],
        given.counts,
        [*map(type, values)],
        [len(state or ()) for state in found],
        [*map(len, payloads)],
        [*chain.from_iterable(chain([state or () for state in found], payloads))],
        [master.mode for master in kept],
        [guard is not None for guard in given.guards],
        shards,
    ]
    given.signature = signature(own, grads, [*tensors, *parts], more)
    return given

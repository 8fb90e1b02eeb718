"""Inputs of an optimizer step: gradients, states and the cache key."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.step.codecs import Payload
from memtrain.kernels.step.prepared import signature
from memtrain.kernels.step.split import NO_MASTER
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
    grads: Sequence[Tensor]
    payloads: list[Payload]
    """Of all states, parameter by parameter."""
    counts: list[tuple[int, int]]
    """Parameters per group, and states of each."""
    seeds: Sequence[int]
    guards: Sequence[Tensor | None]
    """As in `Inputs`."""

    def states(self) -> list[tuple[Payload, ...]]:
        """Return the payloads of each parameter's states."""
        each = iter(self.payloads)
        return [tuple(islice(each, n)) for count, n in self.counts for _ in range(count)]


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
    targets = [target for _, own in parts for target in own]
    if not targets:
        return None
    params, grads, guards, masters = zip(*targets, strict=True)
    if not {grad.layout for grad in grads} <= _DENSE:
        return None
    payloads: list[Any] = []
    for (_, own), own_names in zip(parts, names, strict=True):
        for target in own:
            payloads += map(states.get(target.param, {}).get, own_names)
    if not {*map(type, payloads)} <= _PAYLOAD:
        payloads = [*map(as_payload, payloads)]
        if None in payloads:
            return None
    # A step without guards and masters reads none, one by one.
    own_guards = guards if {*map(type, guards)} != {type(None)} else ()
    own_masters = masters if {*map(id, masters)} != {id(NO_MASTER)} else ()
    corrections = [m.correction for m in own_masters if m.correction is not None]
    counts = [(len(own), len(own_names)) for (_, own), own_names in zip(parts, names, strict=True)]
    more = [
        [*map(id, params)],
        [*names],
        counts,
        [*map(len, payloads)],
        [*chain.from_iterable(payloads)],
        [guard is None for guard in own_guards],
        [(m.correction is None, m.stochastic) for m in own_masters],
        [(x.dtype, x.is_contiguous()) for x in corrections],
    ]
    own_params = params
    if not {*map(type, params)} <= USUAL or any(x.is_complex for x in {p.dtype for p in params}):
        own_params = [real_view(local(p)) for p in params]
        grads = [*map(real_view, grads)]
    tensors = chain(chain.from_iterable(map(dict.values, payloads)), corrections)
    key = signature(own_params, grads, tensors, more)
    seeds = [m.seed for m in own_masters]
    return StepTensors(id(params[0]), key, grads, payloads, counts, seeds, own_guards)

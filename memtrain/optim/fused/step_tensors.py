"""Inputs of an optimizer step: gradients, states and the cache key."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.step.codecs import Payload
from memtrain.kernels.step.groups import Inputs
from memtrain.kernels.step.prepared import signature
from memtrain.kernels.step.split import NO_MASTER
from memtrain.optim.fused.payloads import as_payload, real_view
from memtrain.optim.states.shards import USUAL, local
from memtrain.optim.states.targets import Part

_PAYLOAD, _DENSE = {dict}, {torch.strided}


def tensors_of(
    parts: Sequence[Part], names: Sequence[tuple[str, ...]], states: Mapping[Tensor, Any]
) -> tuple[list[Any], Inputs, Iterator[tuple[Payload, ...]]] | None:
    """Collect the tensors of a step, in the order of the groups.

    `names` are those of the states per group, in the order of the optimizer's codecs. Returns the
    cache key, inputs without scalars and states, and the payloads of each parameter; None if no
    parameter has a gradient or a state is missing.
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
    key = signature(id(params[0]), own_params, grads, tensors, more)
    inputs = Inputs(grads, (), seeds=[m.seed for m in own_masters], guards=own_guards)
    each = iter(payloads)
    return key, inputs, (tuple(islice(each, n)) for count, n in counts for _ in range(count))

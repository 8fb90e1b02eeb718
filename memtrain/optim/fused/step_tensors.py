"""Inputs of an optimizer step: gradients, states and the signature of its kernel tables."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels import dispatch
from memtrain.kernels.step.codecs import Payload
from memtrain.kernels.step.groups import Inputs
from memtrain.kernels.step.split import NO_MASTER
from memtrain.optim.fused.payloads import as_payload, real_view
from memtrain.optim.states.shards import USUAL, local
from memtrain.optim.states.targets import Part

_PAYLOAD, _DENSE, _NO_GUARD, _NO_MASTER = {dict}, {torch.strided}, {type(None)}, {id(NO_MASTER)}


def tensors_of(
    parts: Sequence[Part], names: Sequence[tuple[str, ...]], states: Mapping[Tensor, Any]
) -> tuple[list[Any], Inputs, Iterator[tuple[Payload, ...]]] | None:
    """Collect the tensors of a step, in the order of the groups.

    `names` are those of the states per group, in the order of the optimizer's codecs. Returns a
    signature, which is equal for steps whose kernel tables differ only in `Inputs`; inputs without
    scalars and states; and the payloads of each parameter. Returns None if no parameter has a
    gradient or a state is missing. Each property is read for all tensors at once: a Python loop
    takes longer than a small step.
    """
    targets = [target for _, own in parts for target in own]
    if not targets:
        return None
    params, grads, guards, masters = zip(*targets, strict=True)
    if not {grad.layout for grad in grads} <= _DENSE:
        return None
    counts = [(len(own), own_names) for (_, own), own_names in zip(parts, names, strict=True)]
    payloads: list[Any] = []
    for (_, own), own_names in zip(parts, names, strict=True):
        for target in own:
            payloads += map(states.get(target.param, {}).get, own_names)
    if not {*map(type, payloads)} <= _PAYLOAD:
        payloads = [*map(as_payload, payloads)]
        if None in payloads:
            return None
    # A step without guards and masters reads none, one by one.
    own_guards = () if {*map(type, guards)} == _NO_GUARD else guards
    own_masters = () if {*map(id, masters)} == _NO_MASTER else masters
    corrections = [m.correction for m in own_masters if m.correction is not None]
    own_params = params
    if not {*map(type, params)} <= USUAL or any(map(Tensor.is_complex, params)):
        own_params, grads = [real_view(local(p)) for p in params], [*map(real_view, grads)]
    both = [*own_params, *grads]
    rest = [*chain.from_iterable(map(dict.values, payloads)), *corrections]
    signature = [
        id(params[0]),
        [*map(id, params)],
        counts,
        [*map(tuple, payloads)],
        [guard is None for guard in own_guards] if own_guards else (),
        [(m.mode, m.is_contiguous()) for m in own_masters] if own_masters else (),
        dispatch.forced,
        [(x.dtype, x.shape, x.device) for x in both],
        [*map(Tensor.is_contiguous, both)],
        [*map(Tensor.data_ptr, chain(own_params, rest))],
        [*map(Tensor.numel, rest)],
        {*map(Tensor.get_device, rest)},
        [at & 15 for at in map(Tensor.data_ptr, grads)],
    ]
    inputs = Inputs(grads, (), seeds=[m.seed for m in own_masters], guards=own_guards)
    each = iter(payloads)
    whole = (tuple(islice(each, len(n))) for count, n in counts for _ in range(count))
    return signature, inputs, whole

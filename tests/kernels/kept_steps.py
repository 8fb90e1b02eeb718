"""Steps of entries that find what an earlier step of the same tensors has prepared."""

from itertools import chain

from memtrain.kernels.step.groups import inputs_of
from memtrain.kernels.step.prepared import PreparedStep, signature


def signature_of(entries):
    payloads = chain.from_iterable(entry.states for entry in entries)
    tensors = [*chain.from_iterable(payload.values() for payload in payloads)]
    for entry in entries:
        if entry.master.correction is not None:
            tensors.append(entry.master.correction)
    more = [(e.rule, e.codecs, e.master.mode, e.guard is not None) for e in entries]
    return signature([e.param for e in entries], [e.grad for e in entries], tensors, more)


def step_kept(entries, steps):
    """One step, as the fused optimizers make it."""
    first, key = id(entries[0].param), signature_of(entries)
    known = steps.find(first, key)
    if known is not None:
        known.run(inputs_of(entries))
        return
    made = PreparedStep(entries)
    made.run()
    if made.lasting:
        steps.keep(first, key, made)

"""Entries of every form of states and of weights, for tests of the step's kernels."""

import torch

from memtrain.kernels.step.codecs import EXACT, FACTORED, LLOYD_MAX, Codec
from memtrain.kernels.step.split import NO_MASTER, MasterWeight
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import adamw, lion, sgd

B4, B8 = Codec("block", 4, "DE"), Codec("block", 8, "DE")
SR4 = B4._replace(drawn=True)
V4, V8 = Codec("block", 4, "DE-0", False), Codec("block", 8, "DE-0", False)
FORMS = {
    "exact": ("adamw", (EXACT, EXACT)),
    "4 bits": ("adamw", (B4, V4)),
    "4 bits, stochastic": ("adamw", (SR4, V4)),
    "8 bits": ("adamw", (B8, V8)),
    "rank-1": ("adamw", (B4, Codec("rank1", 4, "Linear", False))),
    "rank-1, stochastic": ("adamw", (SR4, Codec("rank1", 4, "Linear", False))),
    "factored": ("adamw", (B4, FACTORED)),
    "factored, stochastic": ("adamw", (SR4, FACTORED)),
    "8 bits, factored": ("adamw", (B8, FACTORED)),
    "2 bits": ("adamw", (LLOYD_MAX, FACTORED)),
    "lion": ("lion", (B4,)),
    "sgd": ("sgd", (B8,)),
    "no state": ("sgd", ()),
}
MASTERS = {
    "float32": (torch.float32, lambda shape: NO_MASTER),
    "bf16": (torch.bfloat16, lambda shape: NO_MASTER),
    "bf16+sr": (torch.bfloat16, lambda shape: MasterWeight(None, True, 12345)),
    "bf16+8": (torch.bfloat16, lambda shape: corrections(shape, torch.int8)),
    "fp16+16": (torch.float16, lambda shape: corrections(shape, torch.int16)),
}
SCALARS = {
    "adamw": adamw(3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "lion": lion(lr=1e-2, betas=(0.9, 0.99)),
    "sgd": sgd(lr=1e-2, momentum=0.9),
}


def corrections(shape, dtype):
    return MasterWeight(torch.randint(-100, 100, shape, dtype=dtype))


def payload(codec, shape):
    if codec.kind == "exact":
        return {"tensor": torch.rand(shape)}
    found = {name: torch.rand(size) for name, size in codec.sizes(shape).items()}
    if codec.kind != "factored":
        size = codec.block * codec.bits // 8
        found["codes"] = torch.randint(0, 256, (len(found["codes"]) // size, size)).byte()
    if codec.kind == "lloyd_max":
        found["scale"] = found["scale"].bfloat16()
    return found


def entry_of(form, master, shape, dtype=None):
    torch.manual_seed(0)
    rule, codecs = FORMS[form]
    weight, kept = MASTERS[master]
    shape = torch.Size(shape)
    grad = torch.randn(shape).to(dtype or weight)
    states = tuple(payload(codec, shape) for codec in codecs)
    scalars = sgd(lr=1e-2, momentum=0.0) if form == "no state" else SCALARS[rule]
    return Entry(
        torch.randn(shape).to(weight), grad, states, codecs, rule, scalars, None, kept(shape)
    )


def tensors(entry):
    found = [entry.param, *(x for state in entry.states for x in state.values())]
    return [*found, *(x for x in [entry.master.correction] if x is not None)]

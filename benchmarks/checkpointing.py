"""Activation checkpointing of GPT-2-small's blocks: what is held after the forward, and at most.

    python -m benchmarks.tracker -m benchmarks run checkpointing [--set layers=12]

Untrained blocks in float32 with dropout take SGD steps with released gradients on one CPU thread.
A row says what lives after a forward, the most that a step takes besides the weights by prediction
and by every block of a KiB or more that the process asks of malloc (`benchmarks.tracker`), and
the gradient's cosine to plain PyTorch's.
"""

import gc
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import memtrain
from benchmarks import tracker
from benchmarks.harness import Benchmark, Job, Options, Row
from memtrain.audit.live_storages import saved_nbytes
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.training_step import run_step

_BLOCKS = ["preset=activations_only", "activations.recompute=[@blocks]"]
_INPUTS = "activations.recompute_inputs="
_EIGHT = f"{_INPUTS}{{name: group, bits: 8}}"
_HOST = f"{_INPUTS}{{name: host, inner: {{name: group, bits: 8}}}}"
_AGAIN = "activations.recompute_saves=rules"
WAYS = {
    "plain": ["preset=exact", "activations=none"],
    "activations_only": ["preset=activations_only"],
    "checkpointed, inputs kept": _BLOCKS,
    "checkpointed": [*_BLOCKS, _EIGHT],
    "checkpointed, inputs kept, saves by rules": [*_BLOCKS, _AGAIN],
    "checkpointed, saves by rules": [*_BLOCKS, _EIGHT, _AGAIN],
    "checkpointed, inputs on the host, saves by rules": [*_BLOCKS, _HOST, _AGAIN],
}
"""Name -> the config's overrides, but for `gradients=release`."""


def build(layers: int, batch: int, sequence: int) -> tuple[Any, dict[str, Tensor]]:
    """Blocks of GPT-2 small's size over a vocabulary of 512, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, vocab_size=512, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def gradient(case: dict[str, int], way: str) -> Tensor:
    """The gradient of the first batch, in float64."""
    model, batch = build(**case)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), WAYS[way])
    torch.manual_seed(1)
    model(**batch).loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([x.double().flatten() for x in found])


def compare(case: dict[str, int], way: str, exact: Tensor) -> Row:
    """One row: a way beside the gradient of plain PyTorch."""
    found = gradient(case, way)
    cosine = float(torch.nn.functional.cosine_similarity(found, exact, dim=0))
    del found
    model, batch = build(**case)
    optimizer: Any = torch.optim.SGD(model.parameters())
    cfg, options = [*WAYS[way], "gradients=release"], StepOptions()
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    predicted = predict(model, optimizer, batch, cfg, options).peak.nbytes
    model, optimizer = memtrain.wrap(model, optimizer, cfg)
    held = saved_nbytes(lambda: model(**batch).loss, exclude=model.buffers())[0]
    run_step(model, optimizer, batch, options)  # makes what libraries make once and keep
    gc.collect()
    peak = tracker.peaks_of(lambda: run_step(model, optimizer, batch, options))[1]
    return {
        "way": way,
        **case,
        "held_nbytes": held,
        "peak_nbytes": peak,
        "predicted_nbytes": predicted - weights,
        "predicted_over_measured": predicted / (weights + peak),
        "cosine": cosine,
    }


def _jobs(options: Options) -> list[Job]:
    case = {"layers": 4, "batch": 1, "sequence": 256}
    if options.quick:
        case = {"layers": 2, "batch": 1, "sequence": 32}
    case |= {key: int(value) for key, value in (pair.split("=") for pair in options.overrides)}
    exact = cache(partial(gradient, case, "plain"))
    return [Job(way, lambda way=way: [compare(case, way, exact())]) for way in WAYS]


BENCHMARK = Benchmark(
    "checkpointing",
    "activation checkpointing of GPT-2-small's blocks: bytes held, the peak, the gradient's cosine",
    _jobs,
    ("way", "held_nbytes", "peak_nbytes", "predicted_over_measured", "cosine"),
)

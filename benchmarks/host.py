"""Processor time that a training step takes of the host, beside plain, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks run host --clock cpu [--set layers=12 width=64]
    OMP_NUM_THREADS=1 python -m benchmarks run host --clock cpu --set compiled=blocks,whole

GPT-2 of 12 layers at width 64, everything compressed (`min_elements` low): the tensors are so small
that nearly all of it is Python and launches, which a GPU's host does too. Forward, backward and
step are timed on their own, plain and then wrapped; the sums are the last row. Where the model
is compiled, whole or by blocks, both are.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import memtrain
from benchmarks.harness import Benchmark, Job, Options, Row, quantiles

PARTS = ("forward", "backward", "step")
SMALL = ("activations.min_elements=1", "optim.min_elements=1")


class Step:
    """A training step of GPT-2, plain or wrapped, and its parts' processor time."""

    def __init__(self, preset: str, *, layers: int, width: int, compiled: str = "eager") -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        size = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": 64}
        ends = {"bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(**size, **still, **ends, n_positions=32)
        self.model: nn.Module = GPT2LMHeadModel(config).train()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True)
        if preset:
            overrides = [f"preset={preset}", *SMALL]
            self.model, self.optimizer = memtrain.wrap(self.model, self.optimizer, overrides)
        blocks = {"eager": (), "blocks": self.model.transformer.h, "whole": (self.model,)}
        for module in blocks[compiled]:
            module.compile()
        self.x = torch.randint(config.vocab_size, (1, 32))

    def run(self, now: Callable[[], float]) -> tuple[float, ...]:
        """Seconds of forward, backward and step."""
        times = [now()]
        loss = self.model(input_ids=self.x, labels=self.x).loss
        times.append(now())
        loss.backward()
        times.append(now())
        self.optimizer.step()
        times.append(now())
        self.optimizer.zero_grad()
        return tuple(b - a for a, b in pairwise(times))


def _rows(preset: str, options: Options, layers: int, width: int, compiled: str) -> list[Row]:
    size: dict[str, Any] = {"layers": layers, "width": width, "compiled": compiled}
    now = time.process_time if options.clock == "cpu" else time.perf_counter
    times: dict[str, list[tuple[float, ...]]] = {}
    for side, name in {"plain": "", "ours": preset}.items():
        step = Step(name, **size)  # `wrap` discards the graphs of the plain model
        for _ in range(3):  # the first forward records the plan's sites
            step.run(now)
        every = [step.run(now) for _ in range(options.rounds * (1 if options.quick else 5))]
        times[side] = [(*each, sum(each)) for each in every]
    rows = []
    for k, part in enumerate((*PARTS, "all")):
        plain, ours = ([t[k] for t in times[side]] for side in ("plain", "ours"))
        row = {"preset": preset, "part": part, **size}
        row |= quantiles("plain_ms", [1e3 * t for t in plain])
        row |= quantiles("ours_ms", [1e3 * t for t in ours])
        row["ratio"] = statistics.median(ours) / statistics.median(plain)
        rows.append({**row, "rounds": len(ours)})
    return rows


def _jobs(options: Options) -> list[Job]:
    own = {"presets": "balanced", "compiled": "eager"}
    chosen = options.settings(layers="2" if options.quick else "12", width="64", **own)
    size = int(chosen["layers"]), int(chosen["width"])
    return [
        Job(f"{preset}, {compiled}", partial(_rows, preset, options, *size, compiled))
        for preset in chosen["presets"].split(",")
        for compiled in chosen["compiled"].split(",")
    ]


BENCHMARK = Benchmark(
    "host",
    "processor time of forward, backward and step where tensors are tiny, beside plain",
    _jobs,
    ("preset", "compiled", "part", "plain_ms_p50", "ours_ms_p50", "ratio"),
)

"""A large vocabulary's gradients in pieces beside whole ones: the peak, and the step's time.

    python -m benchmarks run row_pieces [--set tokens=64]

An untied Llama whose head and embedding have most of the weights, in bfloat16 under
`all_four_2bit`, on one CPU thread. Both ways step in turns in one process: `time_ratio` is the
median over the steps of a step's processor time to that of the whole way beside it. Peaks are of
live storages, predicted and of a real step.
"""

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

import memtrain
from benchmarks.harness import Benchmark, Job, Options, Row
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict

WAYS = {"whole": "null", "pieces": str(2**22)}
"""Name -> `release.gradient_bytes`."""


def build(case: dict[str, int]) -> tuple[Any, Any, dict[str, Tensor]]:
    """A model, its optimizer and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = case["width"]
    config = LlamaConfig(
        vocab_size=case["vocabulary"],
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=case["layers"],
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.randint(0, case["vocabulary"], (1, case["tokens"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, {"input_ids": tokens, "labels": tokens}


def overrides(way: str) -> list[str]:
    """The config of a way."""
    return ["preset=all_four_2bit", f"release.gradient_bytes={WAYS[way]}"]


def compare(case: dict[str, int], steps: int) -> list[Row]:
    """One row for each way."""
    peaks = {way: [f(*build(case), overrides(way)) for f in (predict, measure)] for way in WAYS}
    runs = {}
    for way in WAYS:
        model, optimizer, batch = build(case)
        runs[way] = *memtrain.wrap(model, optimizer, overrides(way)), batch
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(steps + 2):
        for way, (model, optimizer, batch) in runs.items():
            begin = time.process_time()
            model(**batch).loss.backward()
            optimizer.step()
            times[way].append(time.process_time() - begin)
    pairs = zip(*(run[0].parameters() for run in runs.values()), strict=True)
    apart = max(float((x.detach().float() - y.detach()).abs().max()) for x, y in pairs)
    ratios = {
        way: median(a / b for a, b in zip(own[2:], times["whole"][2:], strict=True))
        for way, own in times.items()
    }
    return [
        {
            "way": way,
            **case,
            "gradient_nbytes": 2 * case["vocabulary"] * case["width"],
            "predicted_nbytes": predicted.peak.nbytes,
            "measured_nbytes": measured.peak.nbytes,
            "at": measured.peak.label,
            "time_ratio": ratios[way],
            "weights_apart": apart,
        }
        for way, (predicted, measured) in peaks.items()
    ]


def _jobs(options: Options) -> list[Job]:
    sizes = {"vocabulary": 65536, "width": 512, "layers": 4, "tokens": 64}
    if options.quick:
        sizes = {"vocabulary": 8192, "width": 256, "layers": 1, "tokens": 8}
    chosen = options.settings(**{name: str(size) for name, size in sizes.items()})
    case = {name: int(value) for name, value in chosen.items()}
    return [Job("all_four_2bit", lambda: compare(case, 1 if options.quick else 9))]


BENCHMARK = Benchmark(
    "row_pieces",
    "a large vocabulary's gradients in pieces: the peak, and the step's time",
    _jobs,
    ("way", "predicted_nbytes", "measured_nbytes", "time_ratio", "weights_apart"),
)

"""Times AdamW4bit.step() over GPT-2-small's shapes against torch's own AdamW, in one run.

    python benchmarks/adamw_step.py [--rounds 9] [--out benchmarks/results/adamw_step.json]

Each round steps every optimizer once, in turn, so that what else the machine does hits all of
them; ratios are of medians and of minima over the rounds. Before timing, one step of each
compressed form is checked against the pure-torch reference.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import memtrain.kernels.cpu as cpu
from memtrain.kernels.dispatch import backend
from memtrain.optim import AdamW4bit, state_bytes

SECONDS = {"rank1": "Rank-1/Linear", "block": "B128/Linear", "factored": "factored"}


def gpt2_small():
    layer = [(768,)] * 4 + [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)]
    layer += [(3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *layer * 12, (768,), (768,)]


def make_params(shapes):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator) * 0.02) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3
    return params


def check(second):
    """One step by the C++ kernel and by the reference: the same to 1e-6 of the step."""
    results = []
    for name in ("cpu", "reference"):
        params = make_params([(300, 128), (200, 77), (5000,)])
        with backend(name):
            AdamW4bit(params, second=second).step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8), second


def processor():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def measure(rounds):
    params = make_params(gpt2_small())
    optimizers = {
        "torch fused": torch.optim.AdamW(params, fused=True),
        "torch foreach": torch.optim.AdamW(params, foreach=True),
        **{name: AdamW4bit(params, second=second) for name, second in SECONDS.items()},
    }
    times = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()  # states are made in the first step
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append((time.perf_counter() - start) * 1e3)
    numel = sum(p.numel() for p in params)
    return [row(name, times, state_bytes(o) / numel, numel) for name, o in optimizers.items()]


def row(name, times, bytes_per_parameter, numel):
    own, base = sorted(times[name]), times["torch fused"]
    each = [a / b for a, b in zip(times[name], base, strict=True)]
    quartiles = statistics.quantiles(own, n=4)
    return {
        "optimizer": name,
        "shapes": "gpt2-small",
        "parameters": numel,
        "state_bytes_per_parameter": round(bytes_per_parameter, 4),
        "median_ms": round(statistics.median(own), 1),
        "min_ms": round(own[0], 1),
        "quartiles_ms": [round(q, 1) for q in quartiles],
        "ratio_of_medians": round(statistics.median(own) / statistics.median(base), 3),
        "ratio_of_minima": round(own[0] / min(base), 3),
        "median_ratio_per_round": round(statistics.median(each), 3),
        "rounds": len(own),
        "threads": torch.get_num_threads(),
        "cpu": processor(),
        "isa": cpu.library().mt_isa() if cpu.library() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a JSON file to write the rows to")
    options = parser.parse_args()
    for second in SECONDS.values():
        check(second)
    rows = measure(options.rounds)
    for r in rows:
        keys = ("optimizer", "state_bytes_per_parameter", "median_ms", "min_ms")
        ratios = ("ratio_of_medians", "ratio_of_minima", "median_ratio_per_round")
        print(*(f"{r[key]!s:>14}" for key in keys + ratios))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

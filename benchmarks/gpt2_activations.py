"""Saved activations of GPT-2-small: bytes of live storages, and what the process itself holds.

Each case runs in a process of its own: one real forward in fp32 without dropout, then the bytes
that it left alive, counted by `LiveStorages` (which knows nothing of memtrain) and confirmed by
what the process's resident memory (on CUDA: the allocator's memory) has grown by. Settings:
`--set batch=8 sequence=512 labels=1 layers=12`.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Benchmark, Job, Options, Row, synchronize

PRESETS = ("plain", "activations_only", "smallest")


def resident(device):
    """Bytes in memory, after giving free pages back."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(case):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import memtrain
    from memtrain.audit.live_storages import LiveStorages

    torch.manual_seed(0)
    device = case["device"]
    config = GPT2Config(
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        attn_implementation=case["attention"], n_layer=case["layers"],
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train().to(device)
    if case["preset"] != "plain":
        optimizer = torch.optim.AdamW(model.parameters())
        memtrain.wrap(model, optimizer, ["preset=" + case["preset"], "optim=none"])
    x = torch.randint(0, config.vocab_size, (case["batch"], case["sequence"]), device=device)

    def forward(x):
        if case["labels"]:
            return model(x, labels=x).loss
        return model.transformer(x).last_hidden_state

    forward(x[:1, :32])  # what the first call allocates for good is not an activation
    before = resident(device)
    start = time.perf_counter()
    with LiveStorages() as live:
        out = forward(x)
        synchronize(device)
        forward_s = time.perf_counter() - start
        held = live.nbytes(exclude=[out])
    grown = resident(device) - before - out.untyped_storage().nbytes()
    start = time.perf_counter()
    out.sum().backward()
    synchronize(device)
    return {
        "live_bytes": held,
        "resident_bytes": grown,
        "forward_s": round(forward_s, 3),
        "backward_s": round(time.perf_counter() - start, 3),
    }


def jobs(options: Options) -> list[Job]:
    size = {"batch": "8", "sequence": "512", "labels": "0", "layers": "12"}
    if options.quick:
        size |= {"batch": "1", "sequence": "64", "layers": "2"}
    chosen = options.settings(**size)
    case = {key: int(value) for key, value in chosen.items()} | {"device": options.device}

    def compare(attention) -> list[Row]:
        results = [_in_a_process({**case, "attention": attention, "preset": p}) for p in PRESETS]
        return [_row(case, attention, preset, results[0], result)
                for preset, result in zip(PRESETS, results, strict=True)]  # fmt: skip

    return [Job(name, lambda name=name: compare(name)) for name in ("eager", "sdpa")]


def _in_a_process(case):
    command = [sys.executable, "-m", "benchmarks.gpt2_activations", json.dumps(case)]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    return json.loads(result.stdout.splitlines()[-1])


def _row(case, attention, preset, plain, result) -> Row:
    return {
        "model": "gpt2",
        "part": "whole, with labels" if case["labels"] else "blocks",
        "attention": attention,
        "activations_of": "balanced" if preset == "activations_only" else preset,
        "layers": case["layers"],
        "batch": case["batch"],
        "sequence": case["sequence"],
        "dtype": "float32",
        "live_ratio": round(result["live_bytes"] / plain["live_bytes"], 4),
        "resident_ratio": round(result["resident_bytes"] / max(plain["resident_bytes"], 1), 4),
        **result,
    }


BENCHMARK = Benchmark(
    "gpt2_activations",
    "saved activations of GPT-2-small, in live storages and in the process's own memory",
    jobs,
    ("attention", "activations_of", "live_bytes", "live_ratio", "resident_bytes", "resident_ratio"),
)

if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))

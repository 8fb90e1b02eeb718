"""Saved activations of GPT-2-small's blocks: bytes of live storages, and the process's own memory.

    python benchmarks/gpt2_activations.py [--batch 8] [--sequence 512] [--labels]

Each case runs in a process of its own: one real forward in fp32 without dropout, then the bytes
that it left alive, counted by `LiveStorages` (which knows nothing of memtrain) and confirmed by
what the process's resident memory has grown by. One row per case goes to
`benchmarks/results/gpt2_activations.csv`.
"""

import argparse
import csv
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "gpt2_activations.csv"
PRESETS = ("plain", "activations_only", "smallest")


def resident():
    """Bytes of this process in memory, after giving free pages back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(args):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import memtrain
    from memtrain.meter import LiveStorages

    torch.manual_seed(0)
    config = GPT2Config(
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        attn_implementation=args.attention,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if args.preset != "plain":
        optimizer = torch.optim.AdamW(model.parameters())
        memtrain.wrap(model, optimizer, ["preset=" + args.preset, "optim=none"])
    x = torch.randint(0, config.vocab_size, (args.batch, args.sequence))

    def forward(x):
        if args.labels:
            return model(x, labels=x).loss
        return model.transformer(x).last_hidden_state

    forward(x[:1, :32])  # what the first call allocates for good is not an activation
    before = resident()
    start = time.perf_counter()
    with LiveStorages() as live:
        out = forward(x)
        seconds = time.perf_counter() - start
        held = live.nbytes(exclude=[out])
    grown = resident() - before - out.untyped_storage().nbytes()
    start = time.perf_counter()
    out.sum().backward()
    return {
        "live_bytes": held,
        "resident_bytes": grown,
        "forward_s": round(seconds, 3),
        "backward_s": round(time.perf_counter() - start, 3),
        "torch": torch.__version__,
        "memtrain": memtrain.__version__,
        "threads": torch.get_num_threads(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--labels", action="store_true", help="with the LM head and the loss")
    parser.add_argument("--attention", choices=("eager", "sdpa"), help=argparse.SUPPRESS)
    parser.add_argument("--preset", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.preset:
        print(json.dumps(measure(args)))
        return
    rows = []
    for attention in ("eager", "sdpa"):
        plain = {}
        for preset in PRESETS:
            command = [sys.executable, __file__, "--attention", attention, "--preset", preset,
                       "--batch", str(args.batch), "--sequence", str(args.sequence),
                       *(["--labels"] if args.labels else [])]  # fmt: skip
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(result.stdout.splitlines()[-1])
            plain = plain or row
            shown = "balanced" if preset == "activations_only" else preset
            rows.append(
                {
                    "model": "gpt2", "part": "whole, with labels" if args.labels else "blocks",
                    "attention": attention, "activations_of": shown,
                    "batch": args.batch, "sequence": args.sequence, "dtype": "float32",
                    "live_ratio": round(row["live_bytes"] / plain["live_bytes"], 4),
                    "resident_ratio": round(row["resident_bytes"] / plain["resident_bytes"], 4),
                    **row, "cpu": platform.processor() or platform.machine(),
                    "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
                }
            )  # fmt: skip
            print(
                f"{attention:5} {shown:9} live {row['live_bytes'] / 2**20:8.1f} MiB "
                f"({rows[-1]['live_ratio']:.4f})  resident {row['resident_bytes'] / 2**20:8.1f} "
                f"MiB ({rows[-1]['resident_ratio']:.4f})"
            )
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

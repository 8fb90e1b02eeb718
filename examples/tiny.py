"""A tiny Llama, its data, and what the examples measure of it: bytes, losses, a resumed run."""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.audit.live_storages import LiveStorages

STEPS = 8


def llama() -> LlamaForCausalLM:
    """The same one at each call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def tokens(samples: int = 64) -> list[dict[str, Tensor]]:
    """Sequences that can be learnt: each counts up from a start of its own."""
    starts = torch.randint(256, (samples, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + torch.arange(64)) % 256
    return [{"input_ids": row, "labels": row} for row in rows]


def saved_bytes(model: nn.Module) -> int:
    """Bytes that a training forward leaves alive for its backward."""
    rows = tokens(8)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model.train()
    with LiveStorages() as live:
        loss = model(**batch).loss
        nbytes = live.nbytes() - loss.nbytes
    return nbytes


def report(
    lines: int,
    packages: Sequence[str],
    run: Callable[[str | None, str, bool], tuple[list[float], nn.Module]],
    folder: str,
    presets: Sequence[str] = ("balanced", "all_four"),
) -> list[dict[str, Any]]:
    """Print a row for each preset: bytes and losses beside plain's, and whether a resume is exact.

    Args:
        lines: That the framework's user adds or changes.
        packages: Whose versions are told.
        run: `(preset or None for plain, folder for checkpoints, whether to resume the run there
            after half its steps)` -> the losses, and the model.
        folder: For checkpoints.
        presets: Which.
    """
    versions = {name: importlib.metadata.version(name) for name in (*packages, "torch")}
    plain, model = run(None, f"{folder}/plain", False)
    kept, rows = saved_bytes(model), []
    for preset in presets:
        losses, model = run(preset, f"{folder}/{preset}", False)
        again, _ = run(preset, f"{folder}/{preset}", True)
        rows.append({
            "preset": preset,
            "bytes": round(saved_bytes(model) / kept, 3),
            "first loss": round(losses[0], 3),
            "plain": round(plain[-1], 3),
            "loss": round(losses[-1], 3),
            "resume": "bit-equal" if again == losses[-len(again) :] else "differs",
            "lines": lines,
            **versions,
        })  # fmt: skip
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
    return rows

"""Shared by the examples: a tiny Llama, its data, and what is measured of it."""

import contextlib
import importlib.metadata
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.audit.live_storages import LiveStorages, storage_nbytes

STEPS = 8


def llama() -> LlamaForCausalLM:
    """The same one at each call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def tokens() -> list[dict[str, Tensor]]:
    """Sequences that can be learnt, 8 a step: each counts up from a start of its own."""
    starts = torch.randint(256, (8 * STEPS, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + torch.arange(64)) % 256
    return [{"input_ids": row, "labels": row} for row in rows]


def batch(start: int, stop: int, every: int = 1) -> dict[str, Tensor]:
    """The sequences of a slice, as the model takes them."""
    rows = tokens()[start:stop:every]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arguments(rate: float = 5e-3) -> dict[str, Any]:
    """Options that the Trainer and TRL's trainers share here.

    At a rate of 1e-2 the last losses of the whole model's training differ by 0.13 (one standard
    deviation) from one seed of the rounding to the next, at 5e-3 by 0.006.

    Args:
        rate: The learning rate.
    """
    return {
        "max_steps": STEPS, "learning_rate": rate, "logging_steps": 1, "save_steps": STEPS // 2,
        "use_cpu": True, "disable_tqdm": True, "report_to": [], "dataloader_pin_memory": False,
    }  # fmt: skip


def trained(trainer: Any, resume: bool, key: str = "loss") -> tuple[list[float], nn.Module]:
    """Numbers that a trainer logged of each step that it ran, and its model."""
    checkpoint = f"{trainer.args.output_dir}/checkpoint-{STEPS // 2}"
    trainer.train(resume_from_checkpoint=checkpoint if resume else None)
    return logged(trainer, resume, key), trainer.model


def logged(trainer: Any, resume: bool, key: str = "loss") -> list[float]:
    """Numbers that a trainer logged of each step that it ran."""
    found = [float(entry[key]) for entry in trainer.state.log_history if key in entry]
    return found[STEPS // 2 :] if resume else found


def saved_bytes(model: nn.Module) -> int:
    """Bytes that a training forward leaves alive for its backward."""
    given = batch(0, 8)
    model.train()
    with LiveStorages() as live:
        loss = model(**given).loss
        nbytes = live.nbytes() - loss.nbytes
    return nbytes


def compiled_bytes(model: nn.Module) -> int:
    """Bytes that the nodes of a loss's graph hold: inside `torch.compile` no op is seen."""
    given = batch(0, 4)
    torch.compiler.reset()
    loss = torch.compile(model.train())(**given).loss
    saved = [x for node in graph_nodes(loss) for x in getattr(node, "saved_tensors", ())]
    older = [*model.parameters(), *model.buffers(), *given.values(), loss]
    return storage_nbytes(saved, exclude=older)


def graph_nodes(output: Tensor) -> list[Any]:
    """Every node of the graph that an output's backward would run, each once."""
    nodes: dict[Any, None] = {}
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += [above for above, _ in node.next_functions]
    return list(nodes)


def report(
    lines: int,
    packages: Sequence[str],
    run: Callable[[str | None, str, bool], tuple[list[float], nn.Module]],
    presets: Sequence[str] = ("balanced", "all_four"),
    saved: Callable[[nn.Module], int] = saved_bytes,
) -> None:
    """Print a row for each preset: bytes and losses beside plain's, and whether a resume is exact.

    Args:
        lines: That the framework's user adds or changes.
        packages: Packages whose versions are printed.
        run: `(preset or None for plain, folder for checkpoints, whether to resume the run there
            after half its steps)` -> the losses, and the model.
        presets: Which.
        saved: Counts the bytes.
    """
    versions = {name: importlib.metadata.version(name) for name in (*packages, "torch")}
    with tempfile.TemporaryDirectory() as own, _processes(own) as folder:
        plain, model = run(None, f"{folder}/plain", False)
        kept = saved(model)
        for preset in presets:
            losses, model = run(preset, f"{folder}/{preset}", False)
            again, _ = run(preset, f"{folder}/{preset}", True)
            row = {
                "preset": preset,
                "bytes": round(saved(model) / kept, 3),
                "first loss": round(losses[0], 3),
                "plain": round(plain[-1], 3),
                "loss": round(losses[-1], 3),
                "resume": "bit-equal" if again == losses[-len(again) :] else "differs",
                "lines": lines,
                **versions,
            }
            sys.stdout.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def _processes(folder: str) -> Iterator[str]:
    """The folder of the first of torchrun's processes, which alone prints; or this one's own."""
    if not dist.is_torchelastic_launched():
        yield folder
        return
    dist.init_process_group("gloo")
    given = [folder]
    dist.broadcast_object_list(given)
    with contextlib.redirect_stdout(io.StringIO() if dist.get_rank() else sys.stdout):
        yield given[0]
    dist.barrier()
    dist.destroy_process_group()

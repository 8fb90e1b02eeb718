"""Predicted against measured peak of a training step, for 71 models.

    python -m benchmarks.tracker -m benchmarks run peaks [--full] [--set models=lstm,gpt2]
    python -m benchmarks run peaks --device cuda

Small models (`benchmarks.peak_models`) take AdamW steps, plain and under five presets. A row says
what `audit.peak` predicts without running the model, and what was allocated at most in the third
real step: on a CPU every block of a KiB or more that the process asked of malloc
(`benchmarks.tracker`), the temporaries inside kernels and the workspaces of libraries among them;
on CUDA what the caching allocator gave out. Smaller blocks are the objects of Python and of
autograd's graph: they are in a column of their own. `--full` adds steps of twelve families under
autocast, with checkpointing, and with gradients released in the backward.
"""

import gc
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import memtrain
from benchmarks import tracker
from benchmarks.harness import Benchmark, Job, Options, Row
from benchmarks.paper_models import Model
from benchmarks.peak_models import MODELS, TWELVE
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors, weight_tensors
from memtrain.audit.peak import StepOptions, measure
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.training_step import run_step
from memtrain.config.sources import load

PLAIN = "plain"
PRESETS = (PLAIN, "balanced", "smallest", "exact", "optimizer_only", "all_four")
STEPS = ("float32", "bfloat16", "checkpoint", "reentrant", "release")
"""How a step runs: in which dtype, with which kind of checkpointing, with gradient release."""
CLOSE, SMALL = 0.03, 2 * 2**20
"""A prediction holds within 3%, or 2 MiB if that is more."""


def applies(name: str, preset: str, step: str) -> bool:
    """Whether a step can run so: plain PyTorch has no release, our own models no checkpointing."""
    if step == "release":
        return preset != PLAIN
    return step in ("float32", "bfloat16") or _checkpoints(name)


@cache
def _checkpoints(name: str) -> bool:
    return bool(getattr(MODELS[name]().model, "supports_gradient_checkpointing", False))


def compare(name: str, preset: str, step: str = "float32", device: str = "cpu") -> Row:
    """One row: a model under a preset, stepped so; predicted beside measured."""
    if device == "cpu":
        tracker.restart()  # raises in a process that is not tracked
    torch.manual_seed(0)
    case = MODELS[name]()
    model: Any = case.model.to(device)
    if step in ("checkpoint", "reentrant"):
        model.activation_checkpointing_enable({"use_reentrant": step == "reentrant"})
    optimizer = torch.optim.AdamW(model.parameters())
    batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, case.batch)
    autocast = torch.bfloat16 if step == "bfloat16" else None
    options = StepOptions(autocast=autocast, loss=case.loss)
    released = ["gradients=release"] if step == "release" else []
    cfg = None if preset == PLAIN else load([f"preset={preset}", *released])
    row: Row = {"model": name, "preset": preset, "step": step, "refused": ""}
    try:
        predicted = predict(model, optimizer, batch, cfg, options).peak
        if device == "cpu":
            small, measured = tracked(Model(model, batch), optimizer, cfg, options)
        else:
            small, measured = 0, measure.measure(model, optimizer, batch, cfg, options).peak.nbytes
    except (RuntimeError, ValueError) as error:
        return {**row, "refused": str(error).partition("\n")[0][:120]}
    return {
        **row,
        "predicted_nbytes": predicted.nbytes,
        "measured_nbytes": measured,
        "objects_nbytes": small,
        "predicted_over_measured": predicted.nbytes / measured,
        "holds": abs(predicted.nbytes - measured) <= max(CLOSE * measured, SMALL),
        "predicted_at": predicted.label,
    }


def tracked(case: Model, optimizer: Any, cfg: Any, options: StepOptions) -> tuple[int, int]:
    """The peak of the third of three steps: tensors alive before it, and what it allocates.

    The first two leave the optimizer's states, and what libraries make once and keep. Returns the
    bytes of small blocks, and the peak of those of a KiB or more.
    """
    model: nn.Module = case.model
    if cfg is not None:
        model, optimizer = memtrain.wrap(model, optimizer, cfg)
    for _ in range(2):
        run_step(model, optimizer, case.batch, options)
    optimizer.zero_grad(set_to_none=True)
    inputs = [leaf for leaf in tree_leaves(case.batch) if isinstance(leaf, Tensor)]
    alive = storage_nbytes([*weight_tensors(model), *state_tensors(optimizer), *inputs])
    gc.collect()  # what is left of jobs before would otherwise be freed within the step
    every, large = tracker.peaks_of(lambda: run_step(model, optimizer, case.batch, options))
    return every - large, alive + large


def _jobs(options: Options) -> list[Job]:
    chosen = {"models": ",".join(MODELS), "presets": ",".join(PRESETS), "steps": ",".join(STEPS)}
    if options.quick:
        chosen = {"models": "pointnet", "presets": "balanced", "steps": "float32"}
    chosen = options.settings(**chosen)
    return [
        Job(f"{name}, {preset}, {step}", partial(_rows, name, preset, step, options.device))
        for name in chosen["models"].split(",")
        for preset in chosen["presets"].split(",")
        for step in chosen["steps"].split(",")
        if step == "float32" or (options.full and name in TWELVE and applies(name, preset, step))
    ]


def _rows(name: str, preset: str, step: str, device: str) -> list[Row]:
    return [compare(name, preset, step, device)]


BENCHMARK = Benchmark(
    "peaks",
    "the predicted peak of a training step beside every byte that a process allocates in one",
    _jobs,
    ("model", "preset", "step", "measured_nbytes", "predicted_over_measured", "holds"),
)

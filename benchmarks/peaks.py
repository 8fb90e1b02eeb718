"""Predicted against measured peak of a training step, for twelve model families.

    python -m benchmarks run peaks [--full] [--set presets=plain,balanced families=gpt2]

Small members of each family take one AdamW step, plain and under each preset. A row says what
`audit.peak` predicts without running the model, and what lives at most in a real step: on the
CPU the storages alive after each op, on CUDA the allocator's peak. By default the presets run in
float32, and `plain` and `balanced` also under bfloat16 autocast, with activation checkpointing and
with gradient release; `--full` crosses all of these.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.families import FAMILIES, Case, decoder, hf, images, text
from benchmarks.harness import Benchmark, Job, Options, Row
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict
from memtrain.config.sources import Config, load

PLAIN = "plain"
PRESETS = (
    PLAIN, "balanced", "smallest", "exact", "activations_only", "optimizer_only", "all_four",
)  # fmt: skip
STEPS = ("float32", "bfloat16", "checkpoint", "reentrant", "release")
"""How a step runs: in which dtype, with which kind of checkpointing, with gradient release."""
OWN: dict[str, Callable[[], Case]] = {
    "bert": lambda: hf(
        "MaskedLM", "BertConfig", text, **decoder(num_hidden_layers=3, intermediate_size=512),
    ),
    "opt": lambda: hf(
        "CausalLM", "OPTConfig", text,
        **decoder(num_hidden_layers=3, ffn_dim=512, word_embed_proj_dim=128),
    ),
    "convnext": lambda: hf(
        "ImageClassification", "ConvNextConfig", lambda: images(64), hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 2, 1], num_labels=10,
    ),
}  # fmt: skip
TWELVE = (
    "gpt2", "roberta", "bert", "llama", "opt", "t5", "vit", "swin", "convnext", "resnet",
    "mobilenet_v2", "cifar_shufflenet_v2",
)  # fmt: skip


def build(family: str) -> Case:
    """A small member of a family, and its batch."""
    return {**FAMILIES, **OWN}[family]()


def applies(family: str, preset: str, step: str) -> bool:
    """Whether a step can run so: plain PyTorch has no release, our own models no checkpointing."""
    if step == "release":
        return preset != PLAIN
    return step in ("float32", "bfloat16") or _checkpoints(family)


def compare(family: str, preset: str, step: str, device: str = "cpu") -> Row:
    """One row: a family under a preset, stepped so; predicted beside measured."""
    torch.manual_seed(0)
    case = build(family)
    model: Any = case.model.to(device)
    if step in ("checkpoint", "reentrant"):
        model.activation_checkpointing_enable({"use_reentrant": step == "reentrant"})
    optimizer = torch.optim.AdamW(model.parameters())
    batch, options = _arguments(case, device, torch.bfloat16 if step == "bfloat16" else None)
    cfg = None if preset == PLAIN else _config(preset, step)
    predicted = predict(model, optimizer, batch, cfg, options)
    measured = measure(model, optimizer, batch, cfg, options)
    real = measured.peak.nbytes
    return {
        "family": family,
        "preset": preset,
        "step": step,
        "predicted_nbytes": predicted.peak.nbytes,
        "measured_nbytes": real,
        "predicted_over_measured": predicted.peak.nbytes / real,
        "predicted_at": predicted.peak.label,
        "measured_in": measured.peak.phase,
        **{f"predicted_{k.replace(' ', '_')}": v for k, v in sorted(predicted.peak.parts.items())},
    }


def _arguments(case: Case, device: str, autocast: Any) -> tuple[Any, StepOptions]:
    """The model's arguments, and how its step runs."""
    if isinstance(case.batch, dict):
        batch = {name: x.to(device) for name, x in case.batch.items()}
        return batch, StepOptions(autocast=autocast)
    pixels, labels = (x.to(device) for x in case.batch)

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, labels)

    return pixels, StepOptions(autocast=autocast, loss=loss)


def _config(preset: str, step: str) -> Config:
    released = ["gradients=release"] if step == "release" else []
    return load([f"preset={preset}", *released])


@cache
def _checkpoints(family: str) -> bool:
    return bool(getattr(build(family).model, "supports_gradient_checkpointing", False))


def _jobs(options: Options) -> list[Job]:
    chosen = {"presets": ",".join(PRESETS), "families": ",".join(TWELVE), "steps": ",".join(STEPS)}
    if options.quick:
        chosen = {"presets": "balanced", "families": "vit", "steps": "float32"}
    chosen = options.settings(**chosen)
    whole = options.full or "presets=" in " ".join(options.overrides)
    return [
        Job(f"{family}, {preset}, {step}", partial(_rows, family, preset, step, options.device))
        for family in chosen["families"].split(",")
        for preset in chosen["presets"].split(",")
        for step in chosen["steps"].split(",")
        if whole or step == "float32" or preset in (PLAIN, "balanced")
        if applies(family, preset, step)
    ]


def _rows(family: str, preset: str, step: str, device: str) -> list[Row]:
    return [compare(family, preset, step, device)]


BENCHMARK = Benchmark(
    "peaks",
    "the predicted peak of a training step beside a measured one, for twelve model families",
    _jobs,
    ("family", "preset", "step", "measured_nbytes", "predicted_over_measured", "predicted_at"),
)

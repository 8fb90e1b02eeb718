"""Every preset on a language model and on a CNN: bytes, gradient, time of forward and backward."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memtrain
from benchmarks.harness import Benchmark, Job, Options, Row, Trial, measure, require
from experiments.cifar import cifar
from memtrain.audit.live_storages import saved_nbytes
from memtrain.config.sources import options as choices
from memtrain.training.networks import GPT

MODELS = ("gpt", "gpt2_layers", "resnet18")
"""A small GPT; two layers of GPT-2-small's width and heads; a ResNet-18 of half its width."""

# Nothing to see, or (`all_four`, which computes in bfloat16) another baseline.
SKIPPED = ("exact", "optimizer_only", "precision_only", "all_four")


class Task:
    """A model, a batch, and the loss of one forward."""

    def __init__(self, name: str, device: str, *, quick: bool) -> None:
        torch.manual_seed(0)
        self.name = name
        if name != "resnet18":
            layers, width, heads, batch, tokens = (4, 256, 4, 4, 256)
            if name == "gpt2_layers":
                layers, width, heads, batch, tokens = (2, 768, 12, 2, 512)
            if quick:
                layers, width, heads, batch, tokens = (2, 64, 4, 2, 64)
            x = torch.randint(0, 256, (batch, tokens), device=device)
            model: nn.Module = GPT(layers=layers, width=width, heads=heads, context=tokens)
            self.y = x.roll(-1, 1)
        else:
            x = torch.randn(4 if quick else 32, 3, 32, 32, device=device)
            model = cifar(family="resnet18", width=0.25 if quick else 0.5, channels=3)
            self.y = torch.randint(0, 10, (len(x),), device=device)
        self.model: nn.Module = model.to(device).train()
        self.x = x

    def output(self) -> Tensor:
        """The model's output; the loss outside of it is nobody's to compress."""
        return self.model(self.x)

    def step(self) -> Tensor:
        """Forward and backward."""
        self.model.zero_grad()
        loss = F.cross_entropy(self.output().flatten(0, -2), self.y.flatten())
        loss.backward()
        return loss.detach()

    def saved(self) -> int:
        """Bytes that a forward of the model leaves alive."""
        own = [*self.model.parameters(), *self.model.buffers(), self.x]
        return saved_nbytes(self.output, exclude=own)[0]


def _row(name: str, preset: str, options: Options) -> list[Row]:
    plain, ours = (Task(name, options.device, quick=options.quick) for _ in range(2))
    seeds = range(2 if options.quick else 4)
    quality = memtrain.gradient_quality(ours.model, ours.step, preset, seeds=seeds, per_site=False)
    optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.0)
    memtrain.wrap(ours.model, optimizer, [f"preset={preset}", "optim=none"])
    ours.step()  # records the plan's sites

    def gate() -> None:
        loss, expected = ours.step(), plain.step()
        require(torch.allclose(loss, expected, rtol=1e-3), f"loss {loss}, plain {expected}")

    before, after = plain.saved(), ours.saved()
    gate()
    elements = plain.x.numel()
    timed = measure(Trial(ours.step, plain.step, gate, elements), options)
    whole = quality.whole
    return [
        {
            "model": name,
            "preset": preset,
            "plain_saved_bytes": before,
            "saved_bytes": after,
            "bytes_ratio": after / before,
            "cosine": whole.cosine,
            "relative_variance": whole.variance,
            **timed,
        }
    ]


def _jobs(options: Options) -> list[Job]:
    presets = [name for name in choices("preset") if name not in SKIPPED]
    if options.quick:
        presets = ["balanced", "fewbit3"]
    chosen = options.settings(models=",".join(MODELS), presets=",".join(presets))
    models, presets = chosen["models"].split(","), chosen["presets"].split(",")
    for names, allowed in ((models, MODELS), (presets, choices("preset"))):
        if unknown := set(names) - set(allowed):
            raise ValueError(f"unknown: {sorted(unknown)}; allowed: {', '.join(allowed)}")
    return [
        Job(f"{name}, {preset}", partial(_row, name, preset, options))
        for name in models
        for preset in presets
    ]


BENCHMARK = Benchmark(
    "presets",
    "the presets: saved bytes, gradient of one batch, time of forward and backward",
    _jobs,
    ("model", "preset", "bytes_ratio", "cosine", "relative_variance", "ratio_p50"),
)

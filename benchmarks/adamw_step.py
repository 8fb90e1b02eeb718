"""AdamW4bit.step() over GPT-2-small's shapes against torch's own AdamW, in one run."""

import torch
from torch import nn

from benchmarks.harness import Benchmark, Job, Options, Trial, require, timed
from memtrain.kernels.dispatch import backend
from memtrain.optim import AdamW4bit, state_bytes

OPTIONS = {
    "rank1": {"second": "Rank-1/Linear"},
    "block": {"second": "B128/Linear"},
    "factored": {"second": "factored"},
    "factored_2bit": {"first": "Lloyd-Max", "second": "factored"},
}
# Bytes that a step must read and write per parameter
FLOORS = {"rank1": 18.6, "block": 14.1, "factored": 17.1, "factored_2bit": 16.5}
TORCH_FLOOR = 28.0


def gpt2_small():
    layer = [(768,)] * 4 + [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)]
    layer += [(3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *layer * 12, (768,), (768,)]


def make_params(shapes, device):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter((torch.randn(s, generator=generator) * 0.02).to(device)) for s in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(device)
    return params


def check(name, device):
    """One step by the fast kernel and by the reference: the same to 1e-5 of the weights."""
    shapes = [(300, 128), (200, 77), (5000,)]
    ours, expected = make_params(shapes, device), make_params(shapes, device)
    AdamW4bit(ours, **OPTIONS[name]).step()
    with backend("reference"):
        AdamW4bit(expected, **OPTIONS[name]).step()
    for a, b in zip(ours, expected, strict=True):
        require(torch.allclose(a, b, rtol=1e-5, atol=1e-8), f"{name} is not the reference")


def jobs(options: Options) -> list[Job]:
    shapes = [(256, 128), (500,)] if options.quick else gpt2_small()
    made = []  # made with the first job, shared by all: only one set of weights is held

    def job(name):
        def build():
            made[:] = made or make_params(shapes, options.device)
            fused = torch.optim.AdamW(made, fused=True)
            if name == "torch foreach":
                optimizer, floor = torch.optim.AdamW(made, foreach=True), TORCH_FLOOR
            else:
                optimizer, floor = AdamW4bit(made, **OPTIONS[name]), FLOORS[name]
            for each in (fused, optimizer):
                each.step()  # states are made in the first step
            numel = sum(p.numel() for p in made)
            return Trial(
                ours=optimizer.step,
                theirs=fused.step,
                gate=lambda: check(name, options.device) if name in FLOORS else None,
                elements=numel,
                nbytes=round(floor * numel),
                copied=4 * numel,
                labels={"state_bytes_per_parameter": state_bytes(optimizer) / numel},
            )

        shape = "tiny" if options.quick else "gpt2-small"
        labels = {"optimizer": name, "baseline": "torch fused", "shapes": shape}
        return timed(name, labels, build, options)

    return [job(name) for name in (*FLOORS, "torch foreach")]


BENCHMARK = Benchmark(
    "adamw_step",
    "the 4-bit AdamW's step against torch's fused one",
    jobs,
    ("optimizer", "state_bytes_per_parameter", "ours_ms_p50", "theirs_ms_p50", "ratio_p50",
     "percent_of_copy", "ours_peak_bytes"),
)  # fmt: skip

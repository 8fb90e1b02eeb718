"""Processor time of the host's Python in an optimizer step on CUDA, beside torch's fused AdamW.

    OMP_NUM_THREADS=1 python -m benchmarks run prepared_step --clock cpu

No GPU is needed: CPU tensors take the host path that CUDA tensors take, and kernels are left out.
The parameters are those of a Llama of 32 layers in number, and small, so that torch's step on the
CPU, which does compute, is Python and its dispatch too. `released`: gradients come one by one, as a
backward brings them; torch's way is an optimizer per parameter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Benchmark, Job, Options, Row, Trial, require, timed
from memtrain.kernels.dispatch import backend
from memtrain.optim import AdamW4bit, AdamW4bitFactor, AdamW8bit, ReleaseGradients, SplitWeights

PARAMETERS = 290
SHAPES = [(64, 64)] * 4 + [(64, 128)] * 3 + [(64,)] * 2
Make = Callable[[list[nn.Parameter]], Any]
STEPS: dict[str, Make] = {
    "8 bits": partial(AdamW8bit, min_elements=0),
    "rank-1": partial(AdamW4bit, min_elements=0),
    "factored": partial(AdamW4bitFactor, min_elements=0),
    "split": lambda params: SplitWeights(AdamW8bit(params, min_elements=0), "bf16+8"),
}
RELEASED: dict[str, Make] = {
    "8 bits": lambda params: ReleaseGradients(STEPS["8 bits"](params)),
    "split": lambda params: ReleaseGradients(STEPS["split"](params)),
}


@contextmanager
def _unlaunched() -> Iterator[None]:
    """The path of Triton, whose launches do nothing."""
    from memtrain.kernels.codebook import quantize_triton
    from memtrain.kernels.step import launch, split_triton

    modules: list[Any] = [launch, split_triton, quantize_triton]
    kept = [module.launch for module in modules]
    for module in modules:
        module.launch = lambda *given, **options: None
    try:
        with backend("triton"):
            yield
    finally:
        for module, own in zip(modules, kept, strict=True):
            module.launch = own


def _params(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(SHAPES[k % len(SHAPES)])) for k in range(count)]


def _give(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


def _build(make: Make, count: int, released: bool) -> Trial:
    ours, theirs = _params(count), _params(count)
    grads = [torch.ones_like(param) for param in ours]
    optimizer = make(ours)
    if released:
        each = [torch.optim.AdamW([param], fused=True) for param in theirs]
    else:
        each = [torch.optim.AdamW(theirs, fused=True)]

    def step() -> None:
        if not released:
            optimizer.step()
            return
        for param, grad in zip(ours, grads, strict=True):
            param.grad = grad if grad.dtype == param.dtype else grad.to(param.dtype)
            optimizer.on_gradient(param)
        optimizer.step()

    def torchs() -> None:
        for one in each:
            one.step()

    def gate() -> None:
        _give(theirs)
        for _ in range(20):  # past the steps at which moments are looked at
            if not released:
                _give(ours)
            step()
        torchs()
        steps = [state["step"].item() for state in optimizer.state.values()]
        require(steps == [20.0] * count, "a parameter was not stepped")

    return Trial(ours=step, theirs=torchs, gate=gate, elements=count, metered=False)


def _run(job: Job) -> list[Row]:
    with _unlaunched():
        return job.run()


def _jobs(options: Options) -> list[Job]:
    jobs = []
    for count in (PARAMETERS, 2 * PARAMETERS):
        for released, kinds in ((False, STEPS), (True, RELEASED)):
            for name, make in kinds.items():
                labels = {"states": name, "released": released, "parameters": count}
                build = partial(_build, make, count, released)
                jobs.append(timed(f"{name}, {count}, released {released}", labels, build, options))
    return [job._replace(run=partial(_run, job)) for job in jobs]


BENCHMARK = Benchmark(
    "prepared_step",
    "the host's Python in a step on CUDA, beside torch's fused AdamW on the CPU",
    _jobs,
    ("states", "released", "parameters", "ours_ms_p50", "theirs_ms_p50", "ratio_p50"),
)

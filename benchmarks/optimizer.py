"""Every fused optimizer's step over GPT-2-small's shapes against torch's fused float32 AdamW.

`--set only=WORD` keeps the rows whose optimizer's name has the word in it, `layers=N` takes N of
the 12 layers and no embedding: peers take minutes for the whole.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from benchmarks.harness import Benchmark, Job, Options, Trial, require, timed
from memtrain import optim
from memtrain.kernels.dispatch import backend

# What makes each, and the bytes that its step must read and write per parameter: parameter 8,
# gradient 4, each state twice; two passes read the gradient and the second moment's codes again.
OURS = {
    "AdamW4bit, B128 both": (lambda p: optim.AdamW4bit(p, second="B128/Linear"), 14.1),
    "AdamW4bit, rank-1": (optim.AdamW4bit, 18.6),
    "AdamW4bitFactor": (optim.AdamW4bitFactor, 17.1),
    "AdamW4bit, 2-bit first": (
        lambda p: optim.AdamW4bit(p, first="Lloyd-Max", second="factored"),
        16.5,
    ),
    "Adam4bit": (optim.Adam4bit, 18.6),
    "AdamW8bit": (optim.AdamW8bit, 16.1),
    "AdamW8bitFactor": (optim.AdamW8bitFactor, 18.1),
    "Adam8bit": (optim.Adam8bit, 16.1),
    "SGD4bit": (lambda p: optim.SGD4bit(p, momentum=0.9), 13.1),
    "SGD8bit": (lambda p: optim.SGD8bit(p, momentum=0.9), 14.0),
    "Lion4bit": (optim.Lion4bit, 13.1),
    "Lion8bit": (optim.Lion8bit, 14.0),
}
# Peers: package, module, class.
PEERS = {
    "torchao AdamW4bit": ("torchao", "torchao.optim", "AdamW4bit"),
    "bitsandbytes AdamW8bit": ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
    "FlashOptim FlashAdamW": ("flashoptim", "flashoptim", "FlashAdamW"),
}


def gpt2_small():
    """Return the shapes of GPT-2-small's parameters."""
    layer = [(768,)] * 4 + [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)]
    layer += [(3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *layer * 12, (768,), (768,)]


def make_params(shapes, device):
    """Return parameters and their gradients, drawn from one seed."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter((torch.randn(s, generator=generator) * 0.02).to(device)) for s in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(device)
    return params


def check(name, device):
    """Two steps by the fast kernel and by the reference: the same to 1e-5 of the weights."""
    shapes = [(300, 128), (200, 77), (5000,)]
    ours, expected = make_params(shapes, device), make_params(shapes, device)
    OURS[name][0](ours).step()
    with backend("reference"):
        OURS[name][0](expected).step()
    for a, b in zip(ours, expected, strict=True):
        require(torch.allclose(a, b, rtol=1e-5, atol=1e-8), f"{name} is not the reference")


def peer(name, params):
    """A peer's optimizer, or why there is none."""
    package, module, kind = PEERS[name]
    if find_spec(package) is None:
        return f"{package} is not installed"
    try:
        optimizer = getattr(import_module(module), kind)(params)
        optimizer.step()
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its row
        return f"{type(error).__name__}: {str(error)[:80]}"
    return optimizer


def sizes(options, layers):
    """Name the shapes and give them: of the whole model where `layers` is empty."""
    if options.quick:
        return "tiny", [(256, 128), (500,)]
    if layers:
        return f"gpt2-small, {layers} layers", gpt2_small()[2 : 2 + 12 * int(layers)]
    return "gpt2-small", gpt2_small()


def jobs(options: Options) -> list[Job]:
    chosen = options.settings(layers="", only="")
    title, shapes = sizes(options, chosen["layers"])
    labels = {"baseline": "torch fused AdamW", "shapes": title}
    made = []  # made with the first job, shared by all: only one set of weights is held

    def params():
        made[:] = made or make_params(shapes, options.device)
        return made

    def trial(name, optimizer, floor, gate, *, metered=True):
        fused = torch.optim.AdamW(params(), fused=True)
        for each in (fused, optimizer):
            each.step()  # states are made in the first step
        numel = sum(p.numel() for p in made)
        return Trial(
            ours=optimizer.step,
            theirs=fused.step,
            gate=gate,
            elements=numel,
            nbytes=round(floor * numel),
            copied=4 * numel,
            metered=metered,
            # of torchao's tensor subclasses neither meter knows the bytes
            labels={
                "state_bytes_per_parameter": optim.state_bytes(optimizer) / numel if metered else ""
            },
        )

    def ours(name):
        make, floor = OURS[name]

        def build():
            return trial(name, make(params()), floor, lambda: check(name, options.device))

        return timed(name, {"optimizer": name, **labels}, build, options)

    def theirs(name):
        row = {"optimizer": name, **labels}

        def run():
            optimizer = peer(name, params())
            if isinstance(optimizer, str):
                return [{**row, "skipped": optimizer}]
            metered = not name.startswith("torchao")
            build = lambda: trial(name, optimizer, 0, lambda: None, metered=metered)  # noqa: E731
            return timed(name, row, build, options).run()

        return Job(name, run)

    every = [ours(name) for name in OURS] + [theirs(name) for name in PEERS]
    return [job for job in every if chosen["only"] in job.title]


BENCHMARK = Benchmark(
    "optimizer",
    "every fused optimizer's step against torch's fused float32 AdamW",
    jobs,
    ("optimizer", "state_bytes_per_parameter", "ours_ms_p50", "theirs_ms_p50", "ratio_p50",
     "percent_of_copy", "ours_peak_bytes", "skipped"),
)  # fmt: skip

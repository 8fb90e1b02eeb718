"""Compiles for sm_90, without a device, what launches ask for; nothing is executed.

A script, as aot.py, whose cases are written by hand; here Triton's launch path specialises on what
training steps give it. Prints JSON: how many kernels, and what was wrong with which.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import memtrain
from benchmarks import machine_code
from benchmarks.gpu_clocks import Scale, guarded
from benchmarks.gpu_steps import driver
from memtrain.kernels import dispatch
from tests.kernels.no_device import NoDevice, replace_launch

PRESETS = ("balanced", "smallest", "fewbit3", "actnn_l3", "patch4x4", "all_four", "all_four_2bit")


class Launches:
    """In place of `device_guard.launch`: compiles, and keeps what was compiled."""

    def __init__(self):
        self.kernels, self.faults, self.step = {}, {}, ""

    def __call__(self, kernel, grid, *arguments, **options):
        try:
            made = kernel.warmup(*arguments, grid=grid, **options)
        except Exception as error:  # noqa: BLE001 (this launch's fault; the others still compile)
            why = f"{type(error).__name__}: {str(error)[:300]}"
            self.faults.setdefault(f"{kernel.fn.__name__}: {why}", self.step)
            return
        self.kernels.setdefault(made.hash, (kernel.fn.__name__, made, self.step))

    def spilt(self):
        """Those that use a stack or spill registers."""
        for name, made, step in self.kernels.values():
            found = machine_code.resources(made.asm["cubin"])
            if found["STACK"] or found["LOCAL"]:
                yield f"{name}: {found}", step


def steps():
    """Training steps by label: driver's cases, and models at the widths that are usual."""
    for label, run in driver(Scale("cpu", False, Path("unused"))):
        yield str(label), run
    for preset in PRESETS:
        for make in (gpt2, llama, convolutions):
            for dtype in (torch.float32, torch.bfloat16):
                yield f"{make.__name__}, {preset}, {dtype}", lambda a=(make, preset, dtype): two(*a)


def two(make, preset, dtype):
    """Two steps, of which the second reuses the first's plan."""
    model, given = make()
    model = model.to(dtype).train()
    given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in given.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = memtrain.wrap(model, optimizer, preset)
    for _ in range(2):
        y = model(**given)
        (y.float().mean() if isinstance(y, torch.Tensor) else y.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def tokens(vocabulary):
    x = torch.randint(vocabulary, (1, 64))
    return {"input_ids": x, "labels": x}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, use_cache=False)), tokens(50257)


def llama():
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, use_cache=False)), tokens(32000)


def convolutions():
    first = (nn.Conv2d(3, 64, 7, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
    then = (nn.Conv2d(64, 128, 3), nn.GroupNorm(8, 128), nn.SiLU(), nn.AvgPool2d(2))
    last = (nn.Flatten(), nn.Dropout(0.1), nn.Linear(128 * 49, 10), nn.LogSoftmax(-1))
    return nn.Sequential(*first, *then, *last), {"input": torch.randn(4, 3, 32, 32)}


def zeros(function):
    """A function of new tensors that are 0: a pooling's backward reads indices of one."""
    return lambda *args, **kwargs: function(*args, **kwargs).zero_()


def main():
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, zeros(getattr(owner, name)))
    launches = Launches()
    replace_launch(memtrain.kernels, launches, NoDevice())
    failed = {}
    with dispatch.backend("triton"):
        for label, run in steps():
            launches.step = label
            row = guarded({}, run)
            if "error" in row:
                failed[label] = row["error"]
    found = {"faults": launches.faults, "spilt": dict(launches.spilt()), "failed": failed}
    sys.stdout.write(json.dumps({"kernels": len(launches.kernels)} | found))


if __name__ == "__main__":
    main()

"""Payloads, values and steps do not depend on torch's default dtype, to the last bit.

Each default runs in its own process, because caches are filled under it too.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from memtrain.compressors import COMPRESSORS, Key
from memtrain.compressors.named import named
from memtrain.kernels.dispatch import backend
from tests.compressors.test_contract import ROWS
from tests.optim.behaviours import FUSED, GENERAL, make

BACKENDS = ("reference", "cpu")


def digest(tensors):
    flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    found = [(x.dtype, x.numel(), x.view(torch.uint8).numpy().tobytes()) for x in flat]
    return hashlib.sha256(str(found).encode()).hexdigest()[:12]


def values(shape):
    """Inputs that do not depend on the default dtype."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return x.bfloat16().float()


def compressed(compressor, x):
    packed = compressor.compress(x, key=Key(seed=3))
    return digest([*packed.tensors.values(), compressor.decompress(packed)])


def stepped(name, dtype, **options):
    params = [nn.Parameter(values(shape).to(dtype)) for shape in ((64, 256), (33, 150), (5000,))]
    optimizer = make(name, params, **options)
    for _ in range(3):
        for param in params:
            param.grad = values(param.shape).to(dtype)
        optimizer.step()
    return digest(params)


def cases() -> dict[str, Callable[[], str]]:
    """Name -> what gives a digest."""
    found = {}
    for name, row in ROWS.items():
        for options in row.options:
            compressor = COMPRESSORS[name](**options)
            x = values((33, 40))
            x = x.abs() if row.make.__name__ == "positive" else x
            x = (100 * x).long() if row.make.__name__ == "integers" else x
            found[f"{compressor}"] = lambda c=compressor, x=x: compressed(c, x)
    for name in ("B128/DE", "B128/DE+SR", "B256/DE8", "B64/E2M1", "Rank-1/Linear"):
        found[name] = lambda name=name: compressed(named(name, signed=name[0] == "B"), values(999))
    for name in (*FUSED, GENERAL):
        for dtype in (torch.float32, torch.bfloat16):
            found[f"{name} {dtype}"] = lambda name=name, dtype=dtype: stepped(name, dtype)
    two_bits = {"first": "Lloyd-Max", "second": "factored"}
    found["2 bits"] = lambda: stepped("AdamW4bit", torch.float32, **two_bits)
    return found


def run():
    for name, found in cases().items():
        for kernels in BACKENDS:
            with backend(kernels):
                try:
                    result = found()
                except Exception as error:  # noqa: BLE001 (the test reports it)
                    result = f"{type(error).__name__}: {error}"
                sys.stdout.write(f"{name} {kernels} -> {result}\n")


@pytest.mark.parametrize(
    "default", ["float64", pytest.param("bfloat16", marks=pytest.mark.nightly)]
)
def test_results_do_not_depend_on_the_default_dtype(default):
    code = "import sys, torch; torch.set_default_dtype(getattr(torch, sys.argv[1]));"
    code += "from tests.test_default_dtype import run; run()"
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    running = [start([sys.executable, "-c", code, name]) for name in ("float32", default)]
    expected, found = (process.communicate()[0].splitlines() for process in running)
    assert len(expected) > 100
    assert not [line for line in expected if "Error" in line]
    assert found == expected

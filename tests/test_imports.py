"""Importing needs no triton, no hydra, no compiled library; the reference path then works."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from memtrain.kernels import cpu, dispatch

PROGRAM = """
import importlib.util, sys, warnings

blocked = {blocked!r}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Block())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in blocked else find_spec(name, *rest)
import torch
import memtrain
import memtrain.optim, memtrain.activations, memtrain.compressors
{body}
"""

TRAIN = """
from memtrain.config import ActivationRule, Activations, Config, Optim, StateRule
from memtrain.kernels import dispatch
cfg = Config(
    activations=Activations(rules=[
        ActivationRule(op="gelu", compressor={"name": "derivative"}),
        ActivationRule(compressor={"name": "group"})]),
    optim=Optim(rules=[StateRule(state="exp_avg", compressor="B128/DE")]),
)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
with dispatch.backend("reference"):
    model(torch.randn(32, 64)).square().sum().backward()
    optimizer.step()
print("trained")
"""


def run(blocked, body):
    program = PROGRAM.format(blocked=blocked, body=body)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_training_works_with_triton_and_hydra_blocked():
    result = run(["triton", "hydra", "matplotlib", "transformers", "sklearn"], TRAIN)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "trained\n"


def test_importing_memtrain_imports_little_and_leaves_the_random_streams_alone():
    program = """
import random, sys
import numpy, torch

def streams():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 4))
x = torch.randn(8, 64)
before = streams()
import memtrain
print(sorted({"triton", "hydra", "transformers", "matplotlib"} & set(sys.modules)))
same = [streams() == before]
model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "balanced")
model(x).sum().backward()
optimizer.step()
same.append(streams() == before)
memtrain.verify(model, x, draws=2)
print(*same, streams() == before)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout == "[]\nTrue True True\n", result.stderr


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("digest", lambda: "another", "built from other sources"),
        ("PATH", Path("nowhere.so"), "not built"),
    ],
)
def test_without_the_compiled_library_the_reference_serves_with_one_warning(
    name, value, why, monkeypatch
):
    if why != "not built" and not cpu.PATH.exists():
        pytest.skip("the C++ library was not built")
    monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(cpu, "library", cache(cpu.library.__wrapped__))
    with pytest.warns(RuntimeWarning, match=f"C\\+\\+ kernels were {why}") as caught:
        assert [dispatch.choose(torch.zeros(1)) for _ in range(3)] == 3 * ["reference"]
    assert len(caught) == 1

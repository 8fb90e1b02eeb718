"""A report small enough to check by hand, and the files that printed output must equal."""

import os
import sys
from pathlib import Path

import pytest

from memtrain.audit.peak import Moment, Timeline
from memtrain.audit.report import KeptTensors, Report, Row

BUILDER = """
import torch
from torch import nn

def build(batch):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    return model, torch.zeros(batch, 64)

def with_optimizer():
    model = nn.Linear(128, 128)
    return model, (torch.zeros(16, 128),), torch.optim.SGD(model.parameters(), momentum=0.9)

def wrong():
    return nn.Linear(2, 2)

def throws():
    raise RuntimeError("out of cheese")

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

def branch():
    return Branch(), torch.ones(4, 64)

number = 3
"""

GOLDEN = Path(__file__).parent / "golden"
LONG = "a." * 60 + "[bold] / scaled_dot_product_attention / input"


@pytest.fixture
def golden():
    """Compares text with golden/<name>; MEMTRAIN_WRITE_GOLDEN=1 writes the files instead."""

    def compare(name, text):
        # what a terminal does not show: blanks at the end of a line
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if os.environ.get("MEMTRAIN_WRITE_GOLDEN"):
            (GOLDEN / name).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / name).read_text(encoding="utf-8")

    return compare


def _timeline(saved):
    """Two layers forward, the loss, two layers backward, the step; the peak is in the backward."""
    moments, weights = [], 16 * 2**20
    for phase, layers in (("forward", (0, 1)), ("backward", (1, 0)), ("step", (0,))):
        for layer in layers:
            parts = {
                "weights": weights,
                "gradients": (2 - layer if phase == "backward" else 2) * 2**20,
                "saved activations": 0 if phase == "step" else saved * (layer + 1),
                "temporaries": saved // 2 if phase == "backward" else 0,
                "allocator rounding": 2**19,
            }
            if phase == "forward":
                parts["gradients"] = 0
            parts = {name: nbytes for name, nbytes in parts.items() if nbytes}
            label = "step" if phase == "step" else f"{phase} of h.{layer}.mlp.act / gelu"
            moments.append(Moment(label, phase, sum(parts.values()), parts))
    return Timeline(tuple(moments))


@pytest.fixture
def report():
    """Two layers and a root, with names that need escaping, and one unknown category."""
    mib = 2**20
    rows = [
        Row(
            name=f"h.{i}.{name}.weight", kind=kind, plain=4 * mib, planned=size,
            compressor="" if size == 4 * mib else "Half()", sites=(f"h.{i}.{name}.weight",),
        )
        for i in range(2)
        for name in ("attn", "mlp")
        for kind, size in (("weight", 4 * mib), ("gradient", 2 * mib))
    ]  # fmt: skip
    rows += [
        Row(
            name=f"h.{i}.mlp.act / gelu / input (+1)", kind="activation", plain=6 * mib,
            planned=3 * mib // 4, compressor="payload",
            sites=(f"h.{i}.mlp.act / gelu / input", f"h.{i}.mlp.fc / linear / input"),
        )
        for i in range(2)
    ]  # fmt: skip
    rows += [
        Row(
            name="(root) / cross_entropy / saved", kind="activation", plain=2 * mib,
            planned=2 * mib, reason="not requested", sites=("(root) / cross_entropy / saved",),
        ),
        Row(name=LONG, kind="activation", plain=100, planned=25, compressor="Group()",
            sites=(LONG,)),
        Row(name='<i>&"été" / relu / input', kind="activation", plain=0, planned=64,
            sites=("é",)),
    ]  # fmt: skip
    kept = (
        KeptTensors(kind="weight", reason="not requested", nbytes=16 * mib, count=4,
             example="h.0.attn.weight"),
        KeptTensors(kind="activation", reason="not requested", nbytes=2 * mib, count=1,
             example="(root) / cross_entropy / saved"),
    )  # fmt: skip
    rules = ("activations.rules.0: op=[silu]",)
    plain, planned = _timeline(6 * mib), _timeline(mib)
    return Report(
        rows=tuple(rows),
        kept=kept,
        unmatched=rules,
        loss=True,
        unknown={"state": "no step"},
        timeline=plain,
        planned_timeline=planned,
    )


@pytest.fixture
def settings():
    """What the sample was made for."""
    return {"model": "sample", "batch": 2, "labels": True, "preset": "exact",
            "overrides": ["seed=3"]}  # fmt: skip


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """A working directory with a user's module in it."""
    (tmp_path / "theirs.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    yield tmp_path
    sys.modules.pop("theirs", None)

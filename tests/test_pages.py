"""The Python blocks of the pages under docs/ run (`test_readme.py` runs README.md's)."""

import ast
import builtins
import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent

MODEL = """
import torch, memtrain
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 128)
        self.act, self.down = nn.GELU(), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x
"""
TRL = """
import trl, trl_sft, tiny
from datasets import Dataset

class SFTTrainer(trl.SFTTrainer):
    def __init__(self, *, model, **options):
        super().__init__(tiny.llama(), processing_class=trl_sft.tokenizer(), **options)

rows = [{"input_ids": row["input_ids"].tolist()} for row in tiny.tokens()]
"""
GIVEN = {
    "memtrain": "import memtrain",
    "model": MODEL + "model = Net()",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "x": "import torch; x = torch.randn(2, 4, 16, 64)",
    "torch": "import torch",
    "SFTTrainer": TRL,
    "args": "args = trl.SFTConfig(folder, bf16=False, use_cpu=True, report_to=[], max_steps=1)",
    "data": "data = Dataset.from_list(rows)",
    "accelerator": "from accelerate import Accelerator; accelerator = Accelerator(cpu=True)",
    "Trainer": "from lightning import Trainer",
}
"""What a block uses without making it -> how a reader would have it by then."""
NEEDS = {"SFTTrainer": ("trl",), "accelerator": ("accelerate",), "Trainer": ("lightning",)}
SLOW = {*NEEDS, "torch"}  # imports of stacks; the compiler
STEP = """
model(x).square().mean().backward()
optimizer.step()
"""
AFTER = {
    "cfg": "model, optimizer = memtrain.wrap(model, optimizer, cfg)" + STEP,
    "AdamW8bit": "optimizer = AdamW8bit(model.parameters(), lr=1e-3)" + STEP,
    "optimizer": STEP,
}
"""What a block makes -> what a reader would do with it."""


def blocks():
    """Every Python block of the pages under docs/."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        code = re.findall(r"(?ms)^ *```python\n(.*?)^ *```$", page.read_text())
        for number, block in enumerate(map(dedent, code)):
            uses = free_names(block)
            marks = [pytest.mark.nightly] if uses & SLOW else []
            name = f"{page.relative_to(ROOT / 'docs')}-{number}"
            found.append(pytest.param(block, uses, marks=marks, id=name))
    return found


def free_names(block):
    """Names that a block reads and nothing in it makes before."""
    made, free = {*dir(builtins)}, set()
    for statement in ast.parse(block).body:
        nodes = [*ast.walk(statement)]
        taken = [n for n in nodes if isinstance(n, ast.arguments)]
        made |= {a.arg for n in taken for a in (*n.args, n.kwarg) if a}
        read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        free |= read - made
        made |= made_by(nodes)
    return free


def made_by(nodes):
    """Names that statements bind."""
    made = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    made |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    imported = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    return made | {a.asname or a.name for n in imported for a in n.names}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("block", "uses"), blocks())
def test_a_pages_python_block_runs(block, uses, tmp_path, monkeypatch):
    for package in [package for name in uses for package in NEEDS.get(name, ())]:
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    assert uses <= GIVEN.keys(), "the page does not say what these are"
    made = made_by([*ast.walk(ast.parse(block))])
    after = next((name for name in AFTER if name in made), None)
    needed = uses | ({"memtrain", "model", "optimizer", "x"} if after else set())
    before = [code for name, code in GIVEN.items() if name in needed]
    space = {"__name__": "page", "folder": str(tmp_path)}
    for code in (*before, block, AFTER.get(after, "")):
        exec(code, space)

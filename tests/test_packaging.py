"""What a wheel holds works from any working directory: configs and C++ sources included."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from memtrain.config.sources import options

ROOT = Path(__file__).parent.parent

PROGRAM = """
import memtrain
from memtrain.config import load, options
assert memtrain.__file__.startswith({folder!r}), memtrain.__file__
import warnings
import torch
model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.GELU(), torch.nn.Linear(80, 80))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(torch.ones(40, 80)).sum().backward()
        optimizer.step()
said, = [str(one.message) for one in seen]
assert "kernels were not built" in said and "pure-torch reference" in said, said
for preset in options("preset"):
    load(preset)
from memtrain.training.settings import compose
for experiment in options("experiment"):
    compose(["experiment=" + experiment])
print(len(options("preset")), len(options("experiment")))
from memtrain.cli import train
from memtrain.cli.report import main as report
assert train.main(["experiment=smoke", "training.steps=2", "output.folder=runs"]) == 0
assert report.main(["--help"]) == 0
from memtrain.audit.report import Report
from memtrain.cli.render.report_data import ReportData
from memtrain.cli.render.json_file import as_text
report = Report(rows=(), kept=(), unmatched=(), loss=True)
assert "memtrain-report" in as_text(ReportData(report, {{}}))
"""


def test_the_built_package_works_without_a_compiler_from_elsewhere(tmp_path):
    """One warning says that the reference is used; every config composes, every program runs."""
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    elsewhere.mkdir()
    build = [sys.executable, "setup.py", "-q", "build_py", "-d", str(package)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(folder=str(package))],
        cwd=elsewhere, env={"PYTHONPATH": str(package)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert first == f"{len(options('preset'))} {len(options('experiment'))}"
    assert [path.name for path in package.iterdir()] == ["memtrain"]
    folder = "memtrain/kernels/cpu"
    sources, packed = (
        {str(path.relative_to(root / folder)) for path in (root / folder).rglob("*.[ch]*")}
        for root in (ROOT, package)
    )
    assert any("/" in name for name in sources)
    assert sources <= packed


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
def test_one_wheel_serves_every_python(compiler, tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "memtrain", source / "memtrain", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    path = {} if compiler else {"PATH": str(tmp_path / "nothing"), "CC": "none", "CXX": "none"}
    build = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=source, env={**os.environ, **path}, check=True, timeout=1200)
    (wheel,) = tmp_path.glob("*.whl")
    tag = wheel.stem.split("-", 2)[2]
    assert tag.startswith("py3-none-linux") if compiler else tag == "py3-none-any"
    held = {name for name in ZipFile(wheel).namelist() if name.endswith(".so")}
    libraries = {"memtrain/kernels/cpu/libmemtrain.so"}
    assert held == (libraries if compiler else set())

"""The diffs of CONTRIBUTING.md's recipes apply, and what they add passes its tests."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"(?m)^## ", (ROOT / "CONTRIBUTING.md").read_text())[1:]
RECIPES = {text.split("\n")[0]: text for text in SECTIONS if "```diff" in text}
FOLDERS = ("memtrain", "tests", "experiments", "benchmarks")


@pytest.fixture(params=RECIPES, ids=lambda title: title.lower().replace(" ", "-"))
def recipe(request, tmp_path):
    """A recipe's text, and a copy of the sources with its diff applied."""
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, tmp_path)
    text = RECIPES[request.param]
    diff = re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1]
    subprocess.run(
        ["git", "apply", "--recount", "-C1", "-"], input=diff, text=True, cwd=tmp_path, check=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )  # fmt: skip
    return text, tmp_path


def test_the_four_recipes_are_there():
    assert list(RECIPES) == [
        "A compressor", "An op that is replaced", "A fused optimizer", "An experiment",
    ]  # fmt: skip


def test_the_diff_applies(recipe):
    text, copy = recipe
    files = [file for file in copy.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    changed = {
        str(file.relative_to(copy))
        for file in files
        if not (original := ROOT / file.relative_to(copy)).exists()
        or file.read_bytes() != original.read_bytes()
    }
    named = set(re.findall(r"(?m)^\+\+\+ b/(\S+)$", text))
    assert changed == named
    assert all(Path(name).suffix in (".py", ".h", ".yaml") for name in named)


@pytest.mark.nightly
def test_what_it_adds_passes(recipe):
    text, copy = recipe
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    if "make kernels" in text:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=copy, check=True, capture_output=True, timeout=900)
    command = re.search(r"(?m)^ {4}python -m pytest (.*)$", text)[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(command)],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]

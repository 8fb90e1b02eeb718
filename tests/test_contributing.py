"""The diffs of CONTRIBUTING.md's recipes apply, and the code that they add passes its tests."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"(?m)^### ", (ROOT / "CONTRIBUTING.md").read_text())[1:]
LINK = re.compile(r"\((tests/recipes/(\w+)\.diff)\)")
RECIPES = {link[2]: text for text in SECTIONS if (link := LINK.search(text))}
FOLDERS = ("memtrain", "tests", "experiments", "benchmarks")


@pytest.fixture(params=RECIPES)
def recipe(request, tmp_path):
    """A recipe's text, its diff, and a copy of the sources with the diff applied."""
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / file, tmp_path)
    diff = (ROOT / f"tests/recipes/{request.param}.diff").read_text()
    subprocess.run(
        ["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )  # fmt: skip
    return RECIPES[request.param], diff, tmp_path


def test_every_recipe_is_linked():
    diffs = {path.stem for path in (ROOT / "tests/recipes").iterdir()}
    assert diffs == set(RECIPES) == {"compressor", "replaced_op", "fused_optimizer", "experiment"}


def test_the_diff_applies(recipe):
    _, diff, copy = recipe
    files = [file for file in copy.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    changed = {
        str(file.relative_to(copy))
        for file in files
        if not (original := ROOT / file.relative_to(copy)).exists()
        or file.read_bytes() != original.read_bytes()
    }
    named = set(re.findall(r"(?m)^\+\+\+ b/(\S+)$", diff))
    assert changed == named
    assert all(Path(name).suffix in (".py", ".h", ".yaml") for name in named)


@pytest.mark.nightly
def test_the_added_code_passes(recipe):
    text, _, copy = recipe
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    if "    make kernels" in text:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=copy, check=True, capture_output=True, timeout=900)
    command = re.search(r"(?m)^ {4,}python -m pytest (.*)$", text)[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(command)],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]

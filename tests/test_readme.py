"""The README's loop runs, its commands and presets exist; the FAQ quotes the package's messages."""

import ast
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.config.sources import options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUOTED = re.findall(r'(?m)^### "(.+)"$', (ROOT / "docs/faq.md").read_text())


def test_the_loop_of_the_diff_runs():
    (diff,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    added = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(added) == 4
    assert not re.search("(?m)^-", diff)
    loop = "\n".join(line[1:] for line in diff.splitlines())
    program = f"import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n{loop}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake (\w+)", README)
    assert {"demo", "test"} <= set(targets)
    assert all(f"\n{target}:" in makefile for target in targets)


def test_presets_are_named():
    """Six in the README, and every one on the page that helps to choose."""
    table = README.split("The six main presets:")[1].split("\n\n")[1]
    six = re.findall(r"(?m)^\| `(\w+)` \|", table)
    assert len(six) == 6
    assert set(six) < set(options("preset"))
    choose = (ROOT / "docs/choose.md").read_text()
    assert [name for name in options("preset") if f"`{name}`" not in choose] == []


def test_the_picture_says_what_the_alt_text_says():
    (alt, path) = re.search(r"!\[(.*)\]\((\S+\.svg)\)", README).groups()
    assert "balanced" in alt
    assert re.search(r"memtrain, balanced: \d+\.\d\d GiB at the peak", (ROOT / path).read_text())


def test_the_rows_of_predicted_peaks_are_counted_as_committed():
    """On every page that names them."""
    with (ROOT / "benchmarks/results/peaks.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    within = sum(row["holds"] == "True" for row in rows)
    for page in ("README.md", "docs/evidence.md", "docs/guides/report.md"):
        assert f"{within} of {len(rows)} rows" in (ROOT / page).read_text()
    ratios = [float(row["predicted_over_measured"]) for row in rows if not row["refused"]]
    near = sum(abs(ratio - 1) <= 0.03 for ratio in ratios)
    text = (ROOT / "benchmarks/README.md").read_text()
    assert f"| {within} within 3% or 2 MiB, {near} within 3%; " in text


@pytest.fixture(scope="module")
def messages():
    """Every string of the package, with a space in place of each value."""
    found = []
    for path in (ROOT / "memtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else " " for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_there_are_quotes():
    assert len(QUOTED) >= 10


@pytest.mark.parametrize("quote", QUOTED)
def test_the_package_has_the_message(quote, messages):
    assert quote in messages

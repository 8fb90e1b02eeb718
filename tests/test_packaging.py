"""What a wheel holds works from any working directory: configs and C++ sources included."""

import subprocess
import sys
from pathlib import Path

from memtrain.config.sources import options

ROOT = Path(__file__).parent.parent

PROGRAM = """
import memtrain
from memtrain.config import load, options
assert memtrain.__file__.startswith({folder!r}), memtrain.__file__
for preset in options("preset"):
    load(preset)
from memtrain.training.settings import compose
for experiment in options("experiment"):
    compose(["experiment=" + experiment])
print(len(options("preset")), len(options("experiment")))
from memtrain.cli import fewbit, train
from memtrain.cli.report import main as report
assert train.main(["experiment=smoke", "training.steps=2", "output.folder=runs"]) == 0
assert train.main(["experiment=precision_tradeoff"]) == 2
assert report.main(["--help"]) == fewbit.main(["relu"]) == 0
from memtrain.audit.report import Report
from memtrain.cli.render.outcome import Outcome
from memtrain.cli.render.page import as_html
assert "</html>" in as_html(Outcome(Report(rows=(), kept=(), unmatched=(), loss=True), {{}}))
"""


def test_the_built_package_composes_every_config_from_elsewhere(tmp_path):
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
    assert "python -m experiments" in result.stderr
    assert [path.name for path in package.iterdir()] == ["memtrain"]
    folder = "memtrain/kernels/cpu"
    sources, packed = (
        {str(path.relative_to(root / folder)) for path in (root / folder).rglob("*.[ch]*")}
        for root in (ROOT, package)
    )
    assert any("/" in name for name in sources)
    assert sources <= packed

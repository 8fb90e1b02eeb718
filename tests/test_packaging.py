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
from memtrain.experiments.config import compose
for experiment in options("experiment"):
    compose(["experiment=" + experiment])
print(len(options("preset")), len(options("experiment")))
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
    assert result.stdout == f"{len(options('preset'))} {len(options('experiment'))}\n"
    folder = "memtrain/kernels/cpu"
    sources, packed = (
        {str(path.relative_to(root / folder)) for path in (root / folder).rglob("*.[ch]*")}
        for root in (ROOT, package)
    )
    assert any("/" in name for name in sources)
    assert sources <= packed

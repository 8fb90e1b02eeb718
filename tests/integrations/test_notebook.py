"""examples/demo.ipynb: ten cells that compile and have no outputs; nightly they run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "demo.ipynb"


def test_the_notebook_has_ten_cells_that_compile_and_no_outputs():
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], len(content["cells"])) == (4, 10)
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    for cell in code:
        compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.nightly
def test_the_notebook_runs(tmp_path):
    for package in ("nbconvert", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    command = ["-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command, str(NOTEBOOK)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads((tmp_path / NOTEBOOK.name).read_text())["cells"]
    outputs = [one for cell in cells for one in cell.get("outputs", [])]
    assert any("image/svg+xml" in one.get("data", {}) for one in outputs)

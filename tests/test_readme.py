"""The README's Python blocks run, in order, as one program; its shell commands exist."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run():
    code = blocks("python")
    assert len(code) >= 2
    program = "import os\nos.environ['HF_HUB_OFFLINE'] = '1'\n" + "\n".join(code)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def test_make_targets_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    targets = re.findall(r"\bmake (\w+)", README)
    assert {"demo", "test"} <= set(targets)
    assert all(f"\n{target}:" in makefile for target in targets)


def test_presets_in_the_readme_exist():
    from memtrain.config.sources import options

    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", README, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == options("preset")

"""Every Triton kernel compiles for sm_80 and sm_90 without a stack and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("aot.py")
KERNELS = SCRIPT.parents[2] / "memtrain/kernels"
MODULES = sorted(
    ".".join(path.relative_to(KERNELS).with_suffix("").parts)
    for path in KERNELS.rglob("*_triton.py")
)

FAULTY = """
import triton
import triton.language as tl

@triton.jit
def _helper(x):
    return x + 1

@triton.jit
def _covered_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = _helper(tl.load(x_ptr + at))
    y = tl.load(x_ptr + N + at)
    tl.store(x_ptr + at[:, None] * N + at[None, :], x[:, None] + y[None, :])

@triton.jit
def _forgotten_kernel(x_ptr):
    tl.store(x_ptr, 0.0)

AOT_CASES = [
    (_covered_kernel, {"x_ptr": "*fp32"}, {"N": 16}),
    (_covered_kernel, {"x_ptr": "*fp32"}, {"N": 64, "maxnreg": 16}),
    (_covered_kernel, {"pointer": "*fp32"}, {"N": 16}),
]
"""


def examined(*names):
    """The script's rows and exit status, in a process where kernels compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_stack_or_spills(module, once):
    rows = [row for row in once("aot", examined)[0] if row.get("module") == module]
    assert [row for row in rows if "fault" in row] == []
    assert {row["sm"] for row in rows} == {80, 90}


@pytest.mark.nightly
def test_every_case_compiles():
    rows, status = examined("--all")
    assert [row for row in rows if "fault" in row] == []
    assert status == 0


def test_faults_are_found(tmp_path):
    faulty, bare = tmp_path / "faulty_triton.py", tmp_path / "bare_triton.py"
    faulty.write_text(FAULTY)
    bare.write_text("import triton\n")
    rows, status = examined(str(faulty), str(bare))
    faults = {(row.get("kernel"), row.get("case")): row["fault"] for row in rows if "fault" in row}
    assert status == 1
    assert faults.keys() == {
        ("_forgotten_kernel", None),
        (None, None),
        ("_covered_kernel", 1),
        ("_covered_kernel", 2),
    }
    assert faults["_forgotten_kernel", None] == "is in no AOT case"
    assert faults[None, None] == "has no AOT_CASES"
    assert "spills" in faults["_covered_kernel", 1]
    assert "arguments missing" in faults["_covered_kernel", 2]

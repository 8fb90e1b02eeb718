"""Every Triton kernel compiles for sm_80 and sm_90 without a stack and without spills.

It does so whatever integers a launch gives it, and takes no more instructions than it took.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks import machine_code

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

@triton.jit
def _unnamed_kernel(x_ptr):
    tl.store(x_ptr, 0.0)

@triton.jit
def _one_kernel(x_ptr, n):
    tl.store(x_ptr, n.to(tl.float32))

AOT_CASES = [
    (_covered_kernel, {"x_ptr": "*fp32"}, {"N": 128, "maxnreg": 16}),
    (_unnamed_kernel, {"pointer": "*fp32"}, {}),
    (_one_kernel, {"x_ptr": "*fp32", "n": "i32"}, {}),
]
"""


def compiling():
    """The environment of a process where kernels compile."""
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def examined(*names):
    """The script's rows and exit status, in a process where kernels compile."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *names], env=compiling(), capture_output=True, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    # A script that raised ends with 1, too, but has no row with a fault.
    assert done.returncode == any("fault" in row for row in rows), done.stderr
    return rows, done.returncode


def examined_once():
    """Every module, and two files that have faults."""
    with TemporaryDirectory() as folder:
        faulty, bare = Path(folder, "faulty_triton.py"), Path(folder, "bare_triton.py")
        faulty.write_text(FAULTY)
        bare.write_text("import triton\n")
        return examined(*MODULES, str(faulty), str(bare))


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_stack_or_spills(module, once):
    rows = [row for row in once("aot", examined_once)[0] if row.get("module") == module]
    assert [row for row in rows if "fault" in row] == []
    if not rows:  # else the script had said that it has kernels
        assert f'"{module}"' not in SCRIPT.with_name("aot_cases.py").read_text()
        return
    assert {row["sm"] for row in rows} == {80, 90}
    if any(row["sizes"] != "multiples" for row in rows):
        assert {row["sizes"] for row in rows} >= {"odd", "ones"}


AIMS = {
    "AdamW": 20,
    "AdamW, 4-bit blocks": 75,
    "AdamW, 4-bit blocks, bf16+sr": 82,  # 6 for the sign of the scale
    "AdamW, 8-bit blocks": 70,
    "group, 4 bits, stochastic": 30,
    "group, 4 bits, stochastic, bf16": 30,
}
"""Instructions an element, whichever Triton compiles."""


@pytest.mark.parametrize("name", machine_code.CASES)
def test_a_kernel_takes_no_more_instructions_than_the_table_says(name, once):
    """Loads that are not vectorised, divisions and searches for each element show here."""
    table = machine_code.read()[name]
    (row,) = [row for row in once("aot", examined_once)[0] if row.get("row") == name]
    assert row["instructions"] <= AIMS.get(name, row["instructions"])
    if version("triton").rsplit(".", 1)[0] == machine_code.TRITON:  # others compile otherwise
        for what in ("instructions", "memory", "registers"):
            assert row[what] <= table[what] * 1.01, what
    if row["kernel"] == "_update_kernel":
        assert row["wide"] == {"loads": True, "stores": True}


SIDES = """
.L_x_9:
        /*0000*/                   ISETP.GE.AND P0, PT, R7, R0, PT ;
        /*0010*/               @P0 LDG.E R1, desc[UR4][R2.64] ;
        /*0020*/                   IADD3 R6, R6, 0x1, RZ ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/              @!P1 LDG.E R1, desc[UR4][R2.64] ;
        /*0050*/                   FMUL R1, R1, R4 ;
.L_x_1:
        /*0060*/              @!P2 BRA `(.L_x_2) ;
        /*0070*/                   FADD R1, R1, R5 ;
        /*0080*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0090*/                   FSEL R1, R1, RZ, !P2 ;
        /*00a0*/                   FADD R1, R1, R5 ;
        /*00b0*/                   FADD R1, R1, R5 ;
.L_x_3:
        /*00c0*/               @P3 BRA `(.L_x_9) ;
.L_x_4:
        /*00d0*/                   BRA `(.L_x_4);
        /*00e0*/                   NOP;
"""


def test_of_two_sides_the_shorter_counts(monkeypatch):
    monkeypatch.setattr(machine_code, "_tool", lambda *args, **kwargs: SIDES)
    found = machine_code.instructions(b"", trips=3)
    once = {"ISETP.GE.AND": 1, "LDG.E": 1, "IADD3": 1, "FADD": 1, "BRA": 4}
    assert {opcode: n for opcode, n in found.items() if n} == {k: 3 * n for k, n in once.items()}


@pytest.mark.nightly
def test_every_case_compiles():
    rows, status = examined("--all")
    assert [row for row in rows if "fault" in row] == []
    assert status == 0


@pytest.mark.nightly
def test_kernels_compile_for_amd():
    """Without PTX, and without spills; no more is known of them there."""
    rows, status = examined("--amd")
    assert [row for row in rows if "fault" in row or row["spilled"]] == []
    assert status == 0
    assert {row["sm"] for row in rows} == {"gfx942", "gfx1100"}


def test_faults_are_found(once):
    rows, status = once("aot", examined_once)
    rows = [row for row in rows if row["module"] not in MODULES]
    faults = {(row.get("kernel"), row.get("case")): row["fault"] for row in rows if "fault" in row}
    assert [r["sizes"] for r in rows if r.get("case") == 2 and "fault" in r] == ["ones"]
    assert "has no attribute 'to'" in faults.pop(("_one_kernel", 2))
    assert status == 1
    assert faults.keys() == {
        ("_forgotten_kernel", None),
        (None, None),
        ("_covered_kernel", 0),
        ("_unnamed_kernel", 1),
    }
    assert faults["_forgotten_kernel", None] == "is in no AOT case"
    assert faults[None, None] == "has no cases"
    assert "spills" in faults["_covered_kernel", 0]
    assert "arguments missing" in faults["_unnamed_kernel", 1]

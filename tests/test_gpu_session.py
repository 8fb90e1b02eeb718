"""The script that a GPU is given runs here, at tiny sizes: it is not what fails there."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import hydra
import pytest
import torch

from memtrain.kernels.dispatch import backend

session = importlib.import_module("benchmarks.gpu_session")
clocks = importlib.import_module("benchmarks.gpu_clocks")
steps = importlib.import_module("benchmarks.gpu_steps")
QUICK = ("environment", "optimizer", "sanitizer")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", QUICK)
def test_step_gives_rows_without_errors(name, tmp_path):
    with backend("triton"):
        cases = steps.CASES[name](clocks.Scale("cpu", True, tmp_path / "rows"))
        found = [clocks.guarded(*case) for case in cases]
    assert found
    assert [row for row in found if "error" in row] == []
    json.dumps(found, default=str)


def test_a_step_is_killed_at_its_limit_and_those_after_it_run(tmp_path):
    out = tmp_path / "gpu_session.jsonl"
    sleeps = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    assert session.launch("long", sleeps, 0.3, out) == "out of time"
    assert session.launch("wrong", [sys.executable, "-c", "1 / 0"], 9, out) == "failed: 1"
    assert "ZeroDivisionError" in out.with_suffix(".log").read_text()


def test_a_step_ends_with_its_session(tmp_path):
    script = (
        "from benchmarks import gpu_session as session\n"
        "session.this = lambda *_, **__: ['sh', '-c', 'echo $$ > pid; exec sleep 60']\n"
        "session.main(['--tiny', '--steps', 'environment', '--out', '.'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(session.ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment) as child:
        pid = tmp_path / "pid"
        while child.poll() is None and not (pid.exists() and pid.read_text()):
            time.sleep(0.1)
        child.terminate()
        assert child.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(int(pid.read_text()), 0)


def test_a_failure_is_a_row():
    def fail():
        raise RuntimeError("out of registers")

    row = clocks.guarded({"kernel": "one"}, fail)
    assert (row["kernel"], row["error"]) == ("one", "RuntimeError: out of registers")


def test_cases_side_by_side_fail_alone():
    def run(code):
        return [sys.executable, "-c", code]

    codes = ("", "import os; os.abort()", "import time; time.sleep(60)", "1 / 0")
    bad = dict(session.side_by_side([*map(run, codes)], seconds=1))
    assert bad.keys() == {1, 2, 3}
    assert bad[1].startswith("exit status -6")
    assert bad[2] == "took longer than 1 s"
    assert "ZeroDivisionError" in bad[3]


DEATHS = {  # and what the error's row says where the process itself could not write it
    "a fault": (f"write(at), sys.exit({session.FAULTED})", None),
    "an abort": ("os.abort()", "its process ended: failed: -6"),
    "a message": ("sys.exit('no')", "its process ended: failed: 1"),
    "exit status 0": ("sys.exit()", "its process ended: ok"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_after_a_case_that_ends_its_process_the_next_has_another(death, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    die, error = DEATHS[death]
    script = (
        "import json, os, sys\n"
        "def write(at, **others):\n"
        "    with open(sys.argv[2], 'a') as file:\n"
        "        file.write(json.dumps({'step': 'gpt2', 'case': at, **others}) + '\\n')\n"
        "for at in range(int(sys.argv[1]), 4):\n"
        "    write(at, begun=True)\n"
        f"    at in (1, 3) and ({die})\n"
        "    write(at)\n"
    )
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(session, "this", lambda _, out, at, **__: [*command, str(at), str(out)])
    out.write_text(
        '{"step": "gpt2", "case": 9}\n{"step": "gpt2", "ended": "ok"}\n'
    )  # of a run before
    assert session.run_whole("gpt2", out, 60, tiny=True) == "ok"
    found = [row for row in rows(out)[2:] if "begun" not in row]
    assert [row["case"] for row in found] == [0, 1, 2, 3]
    assert [row.get("error") for row in found] == [None, error] * 2


def test_a_process_that_ends_before_a_case_ends_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "this", lambda *_, **__: [sys.executable, "-c", "1 / 0"])
    out = tmp_path / "rows.jsonl"
    assert session.run_whole("gpt2", out, 60, tiny=True) == "failed: 1"


def test_a_faulted_device_ends_the_process_of_its_case(tmp_path):
    """With nothing torn down: that would be on the same device."""
    script = (
        "import atexit, os, sys\n"
        "from pathlib import Path\n"
        "from benchmarks import gpu_clocks as clocks, gpu_session as session\n"
        "def clear(self):\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "clocks.Scale.clear = clear\n"
        "atexit.register(os.abort)\n"
        "session.run_step('environment', Path(sys.argv[1]), 1, 2, tiny=True)\n"
    )
    out = tmp_path / "rows.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(session.ROOT)}
    done = subprocess.run([sys.executable, "-c", script, out], check=False, env=environment)
    assert done.returncode == session.FAULTED
    begun, row = rows(out)
    assert begun["begun"]
    assert begun["case"] == row["case"] == 1
    assert row["error"] == "faulted: CUDA error: an illegal memory access was encountered"


def test_what_is_brought_is_not_ignored(tmp_path, monkeypatch):
    """hydra's parsers come with a file that has git ignore them: they would not travel."""

    def install(command, **_):
        folder = Path(command[command.index("--target") + 1]) / "hydra"
        shutil.copytree(Path(hydra.__file__).parent / "grammar", folder / "grammar")
        (folder / "grammar" / "gen" / ".gitignore").write_text("*\n!.gitignore\n")
        return subprocess.CompletedProcess(command, 0)

    with monkeypatch.context() as replaced:
        replaced.setattr(session.subprocess, "run", install)
        assert session.main(["--bring", str(tmp_path / "site")]) == 0
    assert not [*tmp_path.rglob(".gitignore")]
    assert (tmp_path / "site/hydra/grammar/gen/OverrideLexer.py").exists()


def test_no_session_begins_without_a_device(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, session.__file__, "--steps", "environment", "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "torch finds no CUDA device; --tiny runs on a CPU\n"
    assert not out.exists()


@pytest.mark.parametrize("name", ["memtrain", "hydra.grammar.gen.OverrideLexer"])
def test_no_session_begins_without_its_packages(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert session.lacking(tiny=True).startswith(f"{name} cannot be imported")


def test_no_session_begins_without_hydras_parsers(monkeypatch, tmp_path):
    """Without them hydra prints a line and exits."""
    (tmp_path / "memtrain.py").write_text("import sys\nsys.exit(1)\n")
    monkeypatch.delitem(sys.modules, "memtrain")
    monkeypatch.syspath_prepend(tmp_path)
    assert session.lacking(tiny=True).startswith("memtrain cannot be imported, SystemExit(1)")


def test_no_session_begins_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    if shutil.which("gcc") or shutil.which("clang"):
        assert session.lacking(tiny=False) == ""
    monkeypatch.setenv("CC", shutil.which("false"))  # as one that finds no header
    assert session.lacking(tiny=False).startswith("Triton needs Python.h, which is not in /")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert session.lacking(tiny=False).startswith("Triton needs a C compiler")
    assert session.lacking(tiny=True) == ""


def test_waits_are_counted_from_torchs_warnings():
    def step():
        warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert clocks.waits(step, clocks.Scale("cpu", True, Path()))["waits"] == 1


def test_the_commands_that_are_documented_run_every_step_in_time():
    page = (session.ROOT / "docs" / "gpu.md").read_text()
    commands = re.findall(r"(?m)^\| `([\w,]+)` \| .* = (\d+)", page)
    assert ",".join(names for names, _ in commands).split(",") == [*session.LIMITS]
    for names, seconds in commands:
        limits = [session.LIMITS[name] for name in names.split(",") if name != "sanitizer"]
        assert sum(limits) == int(seconds) <= 570


def test_the_rows_may_be_in_a_relative_folder(tmp_path, monkeypatch):
    """Steps change folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "prepare", lambda *_, **__: None)
    found = []
    monkeypatch.setattr(session, "run_step", lambda name, out, *_, **__: found.append(out))
    session.main(["--step", "environment", "--out", "rows"])
    assert found == [tmp_path / "rows"]


@pytest.mark.parametrize("name", steps.optimizers())
def test_the_drivers_optimizers_compress_their_states(name):
    """Else their kernels would not run there."""
    row = steps.stepped(steps.optimizers()[name], clocks.Scale("cpu", True, Path()))
    exact = 4 if name.startswith(("SGD", "Lion")) else 8
    assert row["finite"]
    assert (row["state_bytes_per_parameter"] < exact / 1.6) == (name != "exact")


@pytest.mark.nightly
def test_a_worker_whose_device_has_faulted_ends(tmp_path):
    """One test fails, and not all those after it."""
    (tmp_path / "test_faulty.py").write_text(
        "import pytest, torch\n"
        "torch.cuda.is_initialized = lambda: True\n"
        "torch.cuda.synchronize = lambda: None\n"
        "def fault():\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_kernel(n):\n"
        "    if n == 1:\n"
        "        torch.cuda.synchronize = fault\n"
        "    torch.cuda.synchronize()\n"
    )
    folder = Path(__file__).parent
    environment = {**os.environ, "MEMTRAIN_GPU": "1", "PYTHONPATH": f"{folder}:{folder.parent}"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "conftest", "--rootdir=."]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "3 passed" in done.stdout, done.stdout
    assert "an illegal memory access" in done.stdout
    assert "'test_faulty.py::test_kernel[1]'" in done.stdout  # its worker ended with it


def test_unknown_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        session.main(["--steps", "environment,colour"])
    assert "unknown steps colour; allowed: environment, driver" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_whole_session_runs_on_a_cpu(tmp_path):
    command = [sys.executable, session.__file__, "--tiny", "--seconds", "1200"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run([*command, "--out", str(tmp_path)], check=True, env=environment)
    found = rows(tmp_path / "gpu_session.jsonl")
    assert {row["step"]: row["ended"] for row in found if "ended" in row} == dict.fromkeys(
        session.LIMITS, "ok"
    )
    assert sum(row.get("errors", 0) for row in found) == 0
    assert [row for row in found if "error" in row or "failed" in row] == []

"""The script that a GPU is given runs here, at tiny sizes: it is not what fails there."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from memtrain.kernels.dispatch import backend

session = importlib.import_module("benchmarks.gpu_session")
QUICK = ("environment", "optimizer", "sanitizer")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", QUICK)
def test_step_gives_rows_without_errors(name, tmp_path):
    with backend("triton"):
        found = list(session.STEPS[name].run(session.Scale("cpu", True, tmp_path / "rows")))
    assert found
    assert [row for row in found if "error" in row] == []
    json.dumps(found, default=str)


def test_a_step_is_killed_at_its_limit_and_those_after_it_run(tmp_path):
    out = tmp_path / "gpu_session.jsonl"
    sleeps = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    assert session.launch("long", sleeps, 0.3, out)["ended"] == "out of time"
    assert session.launch("wrong", [sys.executable, "-c", "1 / 0"], 9, out)["ended"] == "failed: 1"
    assert [row["step"] for row in rows(out)] == ["long", "wrong"]
    assert "ZeroDivisionError" in out.with_suffix(".log").read_text()


def test_a_failure_is_a_row():
    def fail():
        raise RuntimeError("out of registers")

    row = session.guarded({"kernel": "one"}, fail)
    assert (row["kernel"], row["error"]) == ("one", "RuntimeError: out of registers")


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
        session.STEPS, "ok"
    )
    assert [row for row in found if "error" in row or "failed" in row] == []

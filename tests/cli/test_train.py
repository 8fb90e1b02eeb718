import os
import signal
import subprocess
import sys
import time

import pytest

from memtrain.cli.train import main


def test_help_teaches_by_examples(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("memtrain-train model=py:MODULE", "resume=", "gpt_stdlib", "balanced", "130"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


def test_config_is_shown_without_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--config", "experiment=smoke", "training.steps=3"]) == 0
    text = capsys.readouterr().out
    assert "steps: 3" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=smok"], "did you mean 'smoke'"),
        (["resume=nowhere"], "there is no checkpoint"),
        (["resume=nowhere", "seed=3"], "'seed=3' cannot change a run that is resumed"),
    ],
)
def test_bad_config_is_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("memtrain-train: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_failing_run_is_exit_status_1(capsys, tmp_path):
    wild = ["optimizer.lr=1e30", "training.warmup=0", "training.clip=0", "training.runs=[plain]"]
    assert main(["experiment=smoke", f"output.folder={tmp_path}", *wild]) == 1
    assert "plain: the loss is" in capsys.readouterr().err


def test_ctrl_c_saves_and_resume_finishes(tmp_path, capsys):
    command = [
        sys.executable,
        "-c",
        "import sys; from memtrain.cli.train import main; sys.exit(main())",
    ]
    long = ["training.steps=100000", "training.eval_every=0", "training.checkpoint_every=0"]
    process = subprocess.Popen(
        [*command, "experiment=smoke", f"output.folder={tmp_path}", *long],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    deadline = time.monotonic() + 120
    while not any(len(p.read_text().splitlines()) > 4 for p in tmp_path.rglob("metrics.csv")):
        assert time.monotonic() < deadline, "no step was done"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "continue with: memtrain-train resume=" in errors
    assert "Traceback" not in errors
    folder = errors.strip().rsplit("resume=", 1)[1]
    done = sum(p.read_text().count(",train,") for p in tmp_path.rglob("metrics.csv"))
    more = [f"training.steps={done + 2}", "training.runs=[plain]"]
    assert main([f"resume={folder}", *more]) == 0
    assert f"step {done + 2}/{done + 2}" in capsys.readouterr().out

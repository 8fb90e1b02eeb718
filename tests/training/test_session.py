import csv
import io
import json
import os
import resource
import signal

import pytest
import torch
from rich.console import Console

from memtrain.training import checkpoint
from memtrain.training import session as session_module
from memtrain.training.run import Run
from memtrain.training.session import Session, new_folder
from memtrain.training.settings import TrainConfig, compose, from_mapping
from tests.equality import differences
from tests.training.runs import at_step, resumed

TIMES = "seconds"


def _rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != TIMES} for row in csv.DictReader(file)]


def _final(folder):
    current = checkpoint.read_checkpoint(folder)["current"]
    # wall time is no part of the state
    current["rows"] = [row[:5] + row[6:] for row in current["rows"]]
    return current


def test_outputs_of_a_whole_call(smoke):
    screen = io.StringIO()
    session = Session(smoke(), console=Console(file=screen, width=80))
    summaries = session.train()
    folder = session.folder
    assert {item.name for item in folder.iterdir()} == {
        "config.yaml",
        "metrics.csv",
        "summary.json",
        "checkpoint.pt",
        "plain_model",
        "wrapped_model",
    }
    rows = _rows(folder)
    for name in ("plain", "wrapped"):
        own = [row for row in rows if row["run"] == name]
        train = [int(row["step"]) for row in own if row["split"] == "train"]
        assert train == list(range(1, 9))
        held_out = [int(row["step"]) for row in own if row["split"] == "validation"]
        assert held_out == [0, 4, 8]
        assert float(own[-1]["loss"]) < float(own[0]["loss"])
    content = json.loads((folder / "summary.json").read_text())
    assert content["runs"] == json.loads(json.dumps(summaries))
    assert content["runs"]["plain"]["bytes"]["saved"] > 0
    text = screen.getvalue()
    assert "saved activations" in text
    assert "tokens/s" in text
    assert str(folder) in text
    weights = torch.load(folder / "wrapped_model/model.pt", weights_only=True)
    assert differences(weights, checkpoint.read_checkpoint(folder)["current"]["model"]) == []


def test_a_call_saves_its_config_and_puts_signal_handlers_back(smoke):
    from omegaconf import OmegaConf

    config = smoke("training.runs=[plain]", "training.steps=2")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    session = Session(config)
    session.train()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert from_mapping(OmegaConf.load(session.folder / "config.yaml")) == config


def test_both_runs_see_the_same_start_and_batches(smoke):
    session = Session(smoke("preset=exact"))
    session.train()
    rows = _rows(session.folder)
    plain, wrapped = (
        [{**row, "run": ""} for row in rows if row["run"] == name] for name in ("plain", "wrapped")
    )
    assert plain == wrapped  # `exact` is plain PyTorch, to the last bit


@pytest.mark.parametrize(
    ("run_name", "step", "number"),
    [
        pytest.param("plain", 4, signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("wrapped", 1, signal.SIGINT, marks=pytest.mark.nightly),
        ("wrapped", 5, signal.SIGTERM),
        pytest.param("plain", 8, signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_interrupted_and_resumed_equals_straight(smoke, run_name, step, number):
    overrides = ["model.dropout=0.1", "training.eval_batches=1"]
    straight = Session(smoke(*overrides))
    straight.train()
    stopped = Session(smoke(*overrides))
    interrupted = pytest.raises(KeyboardInterrupt, match="memtrain-train resume=")
    with at_step(step, lambda: os.kill(os.getpid(), number), run_name), interrupted:
        stopped.train()
    state = checkpoint.read_checkpoint(stopped.folder)
    assert (state["current"]["run"], state["current"]["step"]) == (run_name, step)
    before = {p: p.read_bytes() for p in stopped.folder.rglob("*") if p.is_file()}
    torch.manual_seed(12345)  # what the process did in between plays no part
    torch.rand(10)
    again = resumed(stopped.folder)
    again.train()
    assert again.folder != stopped.folder
    assert before == {p: p.read_bytes() for p in stopped.folder.rglob("*") if p.is_file()}
    assert _rows(again.folder) == _rows(straight.folder)
    assert differences(_final(again.folder), _final(straight.folder)) == []
    for name in ("plain", "wrapped"):
        if (run_name, name) != ("wrapped", "plain"):  # else the first call's folder has it
            files = [s.folder / f"{name}_model/model.pt" for s in (again, straight)]
            assert differences(*(torch.load(file, weights_only=True) for file in files)) == []
        counted = [s.summaries[name]["bytes"] for s in (again, straight)]
        assert counted[0]["states"] == counted[1]["states"]
        assert counted[0]["saved"] == counted[1]["saved"]


def test_resuming_a_finished_call_trains_nothing(smoke, monkeypatch):
    session = Session(smoke())
    session.train()
    again = resumed(session.folder)
    monkeypatch.setattr(Run, "train_step", lambda self: pytest.fail("trained"))
    assert again.train() == session.summaries


def test_freed_pages_are_handed_back_before_a_runs_first_step(smoke, monkeypatch):
    seen, original = [], Run.train_step

    def train_step(self):
        seen.append(self.name)
        return original(self)

    monkeypatch.setattr(session_module, "hand_back_freed_pages", lambda: seen.append("handed"))
    monkeypatch.setattr(Run, "train_step", train_step)
    Session(smoke("training.steps=2", "training.runs=[plain]")).train()
    assert seen == ["handed", "plain", "plain"]


def test_output_folder_that_cannot_be_made_fails_before_training(smoke, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot make output folder"):
        Session(smoke(f"output.folder={tmp_path}/file/outputs"))


def test_folders_are_never_used_twice(tmp_path):
    folders = {new_folder(tmp_path / "x") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)


def test_wrong_plan_shows_before_the_plain_run(smoke, monkeypatch):
    monkeypatch.setattr(Run, "train_step", lambda self: pytest.fail("trained"))
    config: TrainConfig = smoke()
    config.model = {"name": "gpt", "layers": 2, "width": 10, "heads": 4}
    with pytest.raises(ValueError, match="not a multiple"):
        Session(config)


def test_a_damaged_state_is_refused_in_words(smoke):
    session = Session(smoke("training.steps=1", "training.runs=[plain]"))
    run = session._run("plain")
    state = run.state()
    weights = {name: x[:1] for name, x in state["model"].items()}
    for damaged in ({"model": weights}, {"optimizer": {}}, {"rng": None}, {"rows": [[1]]}):
        with pytest.raises(ValueError, match="the checkpoint does not fit the run: "):
            run.load_state({**state, **damaged})
    del state["step"]
    with pytest.raises(ValueError, match="the checkpoint does not fit the run: 'step'"):
        run.load_state(state)


@pytest.fixture
def small_files():
    """A disk, as it were, that takes no file above a size: sets it, and None takes it back."""
    limit = resource.RLIMIT_FSIZE
    before = resource.getrlimit(limit)

    def allow(nbytes):
        most = before[0] if nbytes is None else nbytes
        resource.setrlimit(limit, (most, before[1]))

    yield allow
    resource.setrlimit(limit, before)


def test_a_disk_that_fills_up_keeps_the_older_checkpoint(smoke, small_files, monkeypatch):
    overrides = ["training.checkpoint_every=2", "training.runs=[plain]"]
    session = Session(smoke(*overrides))
    original = Run.train_step

    def train_step(self):
        small_files(64 if self.step >= 4 else None)
        return original(self)

    monkeypatch.setattr(Run, "train_step", train_step)
    with pytest.raises(OSError, match=r"cannot write .*metrics.csv.*File too large"):
        session.train()
    small_files(None)
    monkeypatch.undo()
    again = resumed(session.folder)
    assert again.train()["plain"]["steps"] == 8


@pytest.mark.nightly
def test_a_run_under_a_budget_keeps_its_promise(tmp_path):
    overrides = [
        "experiment=smoke", "budget=2MB", "training.runs=[wrapped]", f"output.folder={tmp_path}",
        "output.quiet=true",
    ]  # fmt: skip
    console = Console(record=True, width=120)
    session = Session(from_mapping(compose(overrides)), console=console)
    summary = session.train()["wrapped"]
    assert session.fit is not None
    assert session.fit.peak.nbytes <= 2_000_000
    assert summary["bytes"]["peak"] == pytest.approx(session.fit.peak.nbytes, rel=0.03)
    assert "promised peak" in console.export_text()
    assert (session.folder / "plan.yaml").read_text().startswith("# A memtrain plan")
    assert torch.isfinite(torch.tensor(summary["train_loss"]))

"""Predictions are read from disk where model, config, batch and versions are the same."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from memtrain.audit.peak import Moment, StepOptions, Timeline, disk_cache
from memtrain.audit.peak.disk_cache import DiskCache, cache_folder
from memtrain.audit.peak.predict import predict

MADE = Timeline((Moment("step", "step", 12, {"weights": 12}),))
X = torch.ones(4, 8)


@pytest.fixture
def cache(tmp_path):
    said = []
    made = DiskCache(tmp_path / "cache", "a model", said.append)
    return made, said


def asked(cache, cfg=None, batch=X):
    """Whether the timeline had to be made."""
    calls = []
    found = cache.timeline(cfg, batch, lambda: calls.append(1) or MADE)
    assert found == MADE
    return bool(calls)


def test_a_timeline_is_made_once_for_each_config_batch_subject_and_version(cache, monkeypatch):
    made, said = cache
    assert asked(made)
    assert not asked(made)
    assert asked(made, "balanced")
    assert not asked(made, {"preset": "balanced"})
    assert asked(made, {"preset": "balanced", "seed": 3})
    assert asked(made, None, torch.ones(5, 8))
    assert asked(made, None, X.bfloat16())
    assert asked(DiskCache(made.folder, "another model", said.append))
    monkeypatch.setattr(disk_cache, "_code", lambda: ("later",))
    assert asked(made)
    assert said == []


def test_a_timeline_is_made_anew_for_what_else_it_is_computed_by(cache, monkeypatch):
    made, _ = cache
    assert asked(made)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert asked(made)
    finally:
        handle.remove()
    assert not asked(made)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert asked(made)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert asked(made)


def test_a_file_that_is_not_ours_is_ignored_with_a_word_and_made_anew(cache):
    made, said = cache
    asked(made)
    (path,) = made.folder.iterdir()
    whole = path.read_bytes()
    other = json.dumps({"key": "{}", "moments": []}).encode()
    for content in (whole[:40], b"", b"text", gzip.compress(b"{"), gzip.compress(other)):
        path.write_bytes(content)
        assert asked(made)
        assert not asked(made)
        assert str(path) in said[-1]
        assert "ignored" in said[-1]
    assert "of another model, config or version" in said[-1]
    assert len(said) == 5


def test_a_folder_that_cannot_be_written_costs_a_word(tmp_path):
    said = []
    (tmp_path / "file").write_text("")
    made = DiskCache(tmp_path / "file", "a model", said.append)
    assert asked(made)
    assert "not cached" in said[-1]


def test_the_oldest_go(cache, monkeypatch):
    made, _ = cache
    monkeypatch.setattr(disk_cache, "ENTRIES", 2)
    for rows in (1, 2, 3):
        asked(made, None, torch.ones(rows, 8))
    assert len([*made.folder.iterdir()]) == 2


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MEMTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "memtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "memtrain"
    monkeypatch.setenv("MEMTRAIN_CACHE", "~/own")
    assert cache_folder() == Path.home() / "own"
    monkeypatch.setenv("MEMTRAIN_CACHE", "")
    assert cache_folder() is None


def test_predict_reads_it(cache, monkeypatch):
    made, _ = cache
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    found = predict(model, optimizer, X, None, StepOptions(cache=made))
    assert found == predict(model, optimizer, X)
    monkeypatch.setattr(
        sys.modules[predict.__module__], "_predicted", lambda *_: pytest.fail("made twice")
    )
    assert predict(model, optimizer, X, None, StepOptions(cache=made)) == found

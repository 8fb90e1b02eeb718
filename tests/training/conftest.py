import json
from pathlib import Path

import pytest
import torch

from memtrain.training import data
from memtrain.training.settings import compose, from_mapping


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def few_files(monkeypatch):
    """Reading the whole library takes half a second; the package `json` stands in for it."""
    files = sorted(Path(json.__file__).parent.glob("*.py"))
    monkeypatch.setattr(data, "stdlib_files", lambda root: files)
    return files


@pytest.fixture
def smoke(tmp_path, few_files):
    """Makes the config of a run that takes a second, with overrides."""

    def make(*overrides):
        folder = f"output.folder={tmp_path}/outputs"
        return from_mapping(compose(["experiment=smoke", folder, *overrides]))

    return make

import pytest
import torch

from memtrain.training.settings import compose, from_mapping


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def smoke(tmp_path):
    """Makes the config of a run that takes a second, with overrides."""

    def make(*overrides):
        folder = f"output.folder={tmp_path}/outputs"
        return from_mapping(compose(["experiment=smoke", folder, *overrides]))

    return make

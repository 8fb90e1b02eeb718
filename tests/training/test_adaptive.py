"""memtrain-train with automatic bits: it measures, and a checkpoint carries the bits."""

import copy

import pytest

from memtrain import api
from memtrain.training.data import build_source
from memtrain.training.run import Run


@pytest.mark.filterwarnings("ignore:the saved activations' bits")
def test_a_run_measures_and_resumes(smoke):
    config = smoke("preset=gact4", "activations.adapt_interval=2", "data.sequence=32")
    source = build_source(config.data, config.seed)
    run = Run("wrapped", config, source)
    for _ in range(2):
        run.train_step()
    bits = api.plan_of(run.model).bits
    assert bits.calls == 2
    assert len(set(bits.widths.values())) > 1
    other = Run("wrapped", config, source)
    other.load_state(copy.deepcopy(run.state()))
    assert [other.train_step().loss for _ in range(2)] == [run.train_step().loss for _ in range(2)]

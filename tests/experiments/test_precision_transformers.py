"""The study of precision assignments of transformers: its ways, and what a run tells."""

import pytest
import torch

import memtrain
from experiments import choice
from experiments.__main__ import CONFIGS
from experiments.precision_transformers import COLUMNS, STUDY, WAYS
from experiments.study import KEY, LOSSES
from experiments.sweep import SweepTrainConfig
from experiments.tasks import TASKS
from memtrain.precision import fp8_gemm
from memtrain.training.settings import compose, from_mapping


def low(way):
    model = TASKS["gpt_short"].model()
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), WAYS[way].config)
    model(torch.zeros(2, 64, dtype=torch.long))
    state = memtrain.precision_state(model)
    return state.assignment, state.config.promotion, state.config.fp8_gemm


def test_ways_are_what_their_names_say():
    whole, promotion, gemm = low("uniform")
    assert (promotion, gemm) == (0.01, False)
    assert low("uniform_no_promotion") == (whole, None, False)
    assert low("uniform_no_promotion_fp8_gemm") == (whole, None, True)
    largest, _, _ = low("size_ordered_0.4")
    smallest, _, _ = low("increasing_0.4")
    assert largest.forward < whole.forward > smallest.forward
    assert len(largest.forward) < len(smallest.forward)
    operator, promotion, _ = low("operator")
    assert promotion == 0.01
    assert operator.forward < low("operator_out")[0].forward < whole.forward


def test_a_run_tells_bytes_and_gemms(monkeypatch):
    monkeypatch.setattr(choice, "validate", lambda model, source: (0.0, 0.0))  # 40 batches
    ways = ["fp32", "uniform", "uniform_fp8_gemm"]
    found = {way: STUDY.train("gpt_short", way, 0, 1e-3, 2) for way in ways}
    for row in found.values():
        assert {*KEY, *row} == {*STUDY.columns, LOSSES}
    plain, low, gemms = (found[way] for way in ways)
    assert [plain[name] for name in COLUMNS] == [0, 1, 0, 0, 0, 0]
    assert low["saved_mib"] < 0.35 * plain["saved_mib"]
    assert low["aggregate"] == pytest.approx(0.5 - 0.25 * low["low_ratio"])
    assert (low["fp8_layers"], gemms["halved"]) == (0, 0)
    if not fp8_gemm.unsupported(torch.ones(16, 16), torch.ones(16, 16)):
        assert gemms["fp8_layers"] == 5
    assert gemms[LOSSES] == pytest.approx(low[LOSSES], rel=1e-5)


@pytest.mark.parametrize("name", ["", "_overflow", "_full"])
def test_the_experiments_name_the_studys_ways(name):
    config = compose([f"experiment=precision_transformers{name}"], SweepTrainConfig, [CONFIGS])
    study = from_mapping(config, SweepTrainConfig).study
    assert {"fp32", "uniform", "operator", "operator_out"} <= {*study.variants} <= {*WAYS}

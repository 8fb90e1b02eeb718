"""The study of optimizer states: each variant is what its name says, and a file goes on."""

import csv

import pytest
import torch

import memtrain
from experiments.__main__ import CONFIGS, main
from experiments.optimizer_states import STUDY, VARIANTS, made, train
from experiments.study import descend
from experiments.sweep import SweepTrainConfig
from experiments.tasks import logistic
from experiments.update_norms import measure
from memtrain.optim import state_bytes
from memtrain.training.settings import compose, from_mapping


def test_a_file_goes_on_where_it_stopped(tmp_path, capsys):
    output = tmp_path / "deep" / "states.csv"
    given = ["tasks=digits", "steps=2", f"output={output}", "seeds=0"]
    assert STUDY.main([*given, "variants=fp32"]) == 0
    assert STUDY.main([*given, "variants=fp32,factored_2bit"]) == 0
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert tuple(rows[0]) == STUDY.columns
    assert [row["variant"] for row in rows] == ["fp32", "factored_2bit"]
    assert float(rows[0]["bytes_per_parameter"]) > 8 > 1 > float(rows[1]["bytes_per_parameter"])
    capsys.readouterr()
    assert STUDY.main(["--table", f"output={output}"]) == 0
    assert "| digits, 2 steps | 0.001 | factored_2bit |" in capsys.readouterr().out
    assert STUDY.main(["seeds=0", "variant=fp32"]) == 2


def test_intervals_are_of_differences_by_seed():
    rows = [
        {"task": "digits", "lr": "1", "steps": "2", "variant": variant, "seed": str(seed)}
        | {"validation_loss": str(loss + seed), "accuracy": "1", "bytes_per_parameter": "8"}
        for variant, loss in (("fp32", 1.0), ("8bit", 1.5))
        for seed in range(3)
    ]
    assert "| 3 | 2.5000 | 1.0000 | 8.00 | +0.5000 +- 0.0000 |" in STUDY.table(rows)[-1]


def test_variants_hold_what_their_names_say():
    found = {name: train("digits", name, 0, 1e-3, 1) for name in ("lion", "factored_exact_moment")}
    assert 4 <= found["lion"]["bytes_per_parameter"] < 4.01
    assert 4 <= found["factored_exact_moment"]["bytes_per_parameter"] < 4.2
    assert set(VARIANTS) >= {"8bit", "rank1_4bit", "factored_4bit", "factored_2bit", "lion_4bit"}


def test_the_experiment_goes_on_where_it_stopped(tmp_path, capsys):
    tiny = ["optimizer_states", f"output.folder={tmp_path}", "study.tasks.digits.steps=1"]
    tiny += ["~study.tasks.gpt_short", "~study.tasks.encoder_short", "study.seeds=[0]"]
    assert main([*tiny, "study.variants=[fp32]"]) == 0
    assert main([*tiny, "study.variants=[fp32,lion]"]) == 0
    rows = list(csv.DictReader((tmp_path / "optimizer_states.csv").read_text().splitlines()))
    assert [(row["task"], row["variant"], row["steps"]) for row in rows] == [
        ("digits", "fp32", "1"),
        ("digits", "lion", "1"),
    ]
    capsys.readouterr()
    assert main([*tiny, "study.variants=[fp33]"]) == 2
    assert "study.variants: 'fp33' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["optimizer_states", "optimizer_states_full"])
def test_the_experiment_has_complete_seeds_first(name):
    config = compose([f"experiment={name}"], SweepTrainConfig, [CONFIGS])
    study = from_mapping(config, SweepTrainConfig).study
    cells = study.cells()
    assert len(set(cells)) == len(cells) == 5 * 3 * len(study.variants)
    assert [cell[2] for cell in cells] == sorted(cell[2] for cell in cells)
    assert {cell[1] for cell in cells} <= set(VARIANTS)


def test_states_that_begin_anew_are_those_of_a_first_step():
    def last(reset):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer = memtrain.optim.AdamW4bitFactor([weight], lr=1.0)
        model = torch.nn.Identity()
        given = lambda step: (weight, torch.zeros(64, dtype=torch.long))  # noqa: E731
        descend(model, optimizer, given, peak=1e-3, steps=3, reset=reset)
        return optimizer.state[weight]["step"].item()

    assert (last(0), last(2)) == (3, 1)


def test_a_model_below_the_threshold_is_compressed():
    model, optimizer = made(VARIANTS["lion_4bit"], logistic(64), 1e-2, 0.0)
    model(torch.randn(2, 8, 8)).sum().backward()
    optimizer.step()
    assert state_bytes(optimizer) == 640 // 2 + 4 * 640 // 128


def test_signs_that_codes_change_are_counted():
    names = ["lion", "lion_8bit", "lion_4bit"]
    rows = measure("logistic_64", 0, names, steps=12)
    fine, coarse = (float(row["cosine"]) for row in rows if row["last_step"] == 12)
    assert 0.5 < coarse < fine < 1.0

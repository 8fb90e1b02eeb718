"""The study of few-bit derivatives: ways hold the bits of their names, and verses are split."""

import json

import pytest
import torch

import memtrain
from experiments import tasks
from experiments.__main__ import CONFIGS, main
from experiments.derivatives import WAYS
from experiments.sweep import SweepTrainConfig
from experiments.tasks import TASKS
from memtrain.training.settings import compose, from_mapping


def test_ways_hold_the_bits_of_their_names():
    def held(way):
        model = TASKS["digits_gelu"].model()
        optimizer = torch.optim.SGD(model.parameters())
        model, _ = memtrain.wrap(model, optimizer, WAYS[way].config)
        model(torch.rand(16, 1, 8, 8))
        sites = memtrain.plan_of(model).entries("activation")
        nonlinear = sum(site.planned for site in sites if "gelu" in site.site)
        return nonlinear, sum(site.planned for site in sites) - nonlinear

    elements = 16 * (32 * 64 + 64 * 64 + 64 * 16 + 64)
    for bits in (1, 3):
        fewbit, exact = held(f"fewbit{bits}")
        group, same = held(f"actnn{bits}")
        assert (fewbit, group) == (elements * bits / 8, elements * (bits + 1 / 8) / 8)
        assert exact == same
    fewbit, rest = held("actnn4_fewbit2")
    group, same = held("actnn4_actnn2")
    assert (fewbit, group) == (elements * 2 / 8, elements * (2 + 1 / 8) / 8)
    assert rest == same < exact / 6


def test_verses_of_a_chapter_are_on_one_side(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    lines = [
        {"book": book, "chapter": chapter, "text": f"{number} {chapter} {verse}"}
        for number, book in enumerate(("Genesis", "Malachi", "Matthew", "Jude"))
        for chapter in range(1, 9)
        for verse in range(10)
    ]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "data" / "kjv.jsonl").write_text(text)
    monkeypatch.setattr(tasks, "_installed", lambda module, package: tmp_path)
    monkeypatch.setattr(
        tasks,
        "_tokens",
        lambda texts, tokens: torch.tensor([list(map(int, text.split())) for text in texts]),
    )
    parts = tasks.verses(0, 32, train=60, validation=20).parts
    chapters = {}
    for split, (rows, classes) in parts.items():
        assert torch.equal(rows[:, 0] >= 2, classes == 1)  # Matthew is the first of the new
        assert classes.float().mean() == 0.5
        assert len(set(map(tuple, rows.tolist()))) == len(rows) == {"train": 60}.get(split, 20)
        chapters[split] = {tuple(row[:2]) for row in rows.tolist()}
    assert not chapters["train"] & chapters["validation"]


@pytest.mark.parametrize("name", ["derivatives", "derivatives_full"])
def test_the_experiment_names_the_studys_ways(name):
    config = compose([f"experiment={name}"], SweepTrainConfig, [CONFIGS])
    assert set(from_mapping(config, SweepTrainConfig).study.variants) == set(WAYS)


def test_an_unknown_study_is_told(capsys):
    assert main(["optimizer_states", "study.name=optimiser_states"]) == 2
    assert "did you mean 'optimizer_states'? allowed: derivatives" in capsys.readouterr().err

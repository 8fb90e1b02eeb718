"""The studies of variants to train: each matches its name, and the table names the best."""

import pytest
import torch

import memtrain
from experiments import choice
from experiments.cifar import cifar
from experiments.study import read
from experiments.tasks import UNet3d, volumes


def test_variants_hold_what_their_names_say(monkeypatch):
    monkeypatch.setattr(choice, "validate", lambda model, source: (0.0, 0.0))  # 40 batches
    variants = ("plain", "checkpointing", "balanced")
    found = {variant: choice.train("gpt", variant, 0, 1e-3, 2) for variant in variants}
    assert set(found["plain"]) | set(choice.KEY) == {*choice.COLUMNS}
    peaks = {variant: row["peak_mib"] for variant, row in found.items()}
    assert peaks["balanced"] < 0.4 * peaks["plain"]
    assert 0 < found["balanced"]["saved_mib"] < 0.2 * found["plain"]["saved_mib"]
    assert peaks["checkpointing"] < 0.7 * peaks["plain"]
    assert found["checkpointing"]["recomputed_blocks"] == 3
    # Nothing is rounded there: after a step the very loss of the plain run.
    assert found["checkpointing"]["train_loss"] == found["plain"]["train_loss"]
    assert set(choice.VARIANTS) >= {"smallest", "checkpointed", "all_four"}


def test_gact_measures_while_it_is_trained(monkeypatch):
    kept = []

    def keep(model, source):
        kept.append(memtrain.plan_of(model).bits)
        return 0.0, 0.0

    monkeypatch.setattr(choice, "validate", keep)
    choice.train("digits", "gact4", 0, 1e-3, 2)
    assert kept[0].calls == 2
    assert len(set(kept[0].widths.values())) > 1  # by need


def test_a_volume_is_segmented():
    source = volumes(8, 4, 2, seed=0)
    inputs, targets = source.batch("train", 0, 2)
    assert UNet3d(2)(inputs).shape == (*targets.shape, 3)
    assert set(targets.unique().tolist()) == {0, 1, 2}
    assert torch.equal(volumes(8, 4, 2, seed=0).batch("train", 0, 2)[0], inputs)
    # Box and ball are equally bright: the mean separates them from the background only.
    images, classes = volumes(16, 50, 2, seed=0).parts["train"]
    bright = [images.squeeze(1)[classes == kind].mean().item() for kind in range(3)]
    assert bright == pytest.approx([0, 1, 1], abs=0.02)


def test_what_beats_what():
    rows = [
        {"task": "digits", "lr": "1", "steps": "2", "variant": variant, "seed": str(seed)}
        | {
            "validation_loss": str(loss[seed]),
            "accuracy": "1",
            "peak_mib": peak,
            "saved_mib": "1",
            "step_ms": time,
        }
        for variant, loss, peak, time in (
            ("plain", (1.0, 2.0, 3.0), "8", "1"),
            ("smaller", (1.1, 1.9, 3.0), "4", "2"),  # +0.00 +- 0.25
            ("worse", (1.5, 2.5, 3.6), "5", "2"),
            ("tiny", (1.6, 2.6, 3.7), "2", "2"),
        )
        for seed in range(3)
    ]
    reported = {line.split(" | ")[2]: line for line in choice.table(rows)}
    assert reported["plain"].endswith("|  |  |")
    assert reported["smaller"].endswith("| +0.0000 +- 0.2484 |  |")
    assert reported["worse"].endswith("| +0.5333 +- 0.1434 | smaller |")
    assert reported["tiny"].endswith("| +0.6333 +- 0.1434 |  |")


def test_a_study_continues_and_runs_of_several_lengths_are_separate_rows(tmp_path, capsys):
    output = tmp_path / "runs.csv"
    call = ["tasks=digits", "variants=plain", "seeds=0", "steps=1,2", f"output={output}"]
    assert choice.main(call) == 0
    rows = read(output)
    assert [row["steps"] for row in rows] == ["1", "2"]
    assert choice.main(call) == 0  # nothing remains
    assert read(output) == rows
    capsys.readouterr()
    assert choice.main([*call, "--table"]) == 0
    assert "digits, 2 steps | 0.001 | plain" in capsys.readouterr().out
    assert choice.main(["variants=plane"]) == 2
    assert "unknown: plane; allowed: plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "parameters"),
    # as in the public CIFAR forms of them
    [("shufflenet_v2", 1_263_854), ("resnet18", 11_173_962)],
)
def test_cifar_families(family, parameters):
    model = cifar(family=family, channels=3)
    assert sum(p.numel() for p in model.parameters()) == parameters

"""The studies of ways to train: each is what its name says, and what beats what is told."""

import pytest
import torch

import memtrain
from experiments import choice, few_bits
from experiments.study import LOSSES
from experiments.tasks import TASKS, UNet3d, volumes


def test_ways_hold_what_their_names_say(monkeypatch):
    monkeypatch.setattr(choice, "validate", lambda model, source: (0.0, 0.0))  # 40 batches
    ways = ("plain", "checkpointing", "balanced")
    found = {way: choice.STUDY.train("gpt", way, 0, 1e-3, 2) for way in ways}
    assert set(found["plain"]) | set(choice.KEY) == {*choice.STUDY.columns, LOSSES}
    assert len(found["plain"][LOSSES]) == 2
    peaks = {way: row["peak_mib"] for way, row in found.items()}
    assert peaks["balanced"] < 0.4 * peaks["plain"]
    assert peaks["checkpointing"] < 0.7 * peaks["plain"]
    assert found["checkpointing"]["recomputed_blocks"] == 3
    # Nothing is rounded there: after a step the very loss of the plain run.
    assert found["checkpointing"]["train_loss"] == found["plain"]["train_loss"]
    assert set(choice.WAYS) >= {"smallest", "checkpointed", "all_four"}


def test_patches_and_groups_hold_equal_bytes():
    def held(way):
        model = TASKS["digits"].model()
        optimizer = torch.optim.SGD(model.parameters())
        model, _ = memtrain.wrap(model, optimizer, few_bits.WAYS[way].config)
        model(torch.rand(16, 1, 8, 8))
        sites = memtrain.plan_of(model).entries("activation")
        return sum(site.planned for site in sites if "payload" not in site.compressor)

    patch, group16, group32, group256 = map(
        held, ("patch_nearest", "group16_2bit", "group32_3bit", "group256_4bit")
    )
    assert patch == group16 == group32 < group256 < 1.01 * patch


def test_gact_measures_while_it_is_trained(monkeypatch):
    kept = []

    def keep(model, source):
        kept.append(memtrain.plan_of(model).bits)
        return 0.0, 0.0

    monkeypatch.setattr(choice, "validate", keep)
    few_bits.STUDY.train("digits", "gact4", 0, 1e-3, 2)
    assert kept[0].calls == 2
    assert len(set(kept[0].widths.values())) > 1  # by need


def test_a_volume_is_segmented():
    source = volumes(8, 4, 2, seed=0)
    inputs, targets = source.batch("train", 0, 2)
    assert UNet3d(2)(inputs).shape == (*targets.shape, 3)
    assert set(targets.unique().tolist()) == {0, 1, 2}
    assert torch.equal(volumes(8, 4, 2, seed=0).batch("train", 0, 2)[0], inputs)
    # Box and ball are equally bright: the mean tells them from the ground only.
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
    told = {line.split(" | ")[2]: line for line in choice.STUDY.table(rows)}
    assert told["plain"].endswith("|  |  |")
    assert told["smaller"].endswith("| +0.0000 +- 0.2484 |  |")
    assert told["worse"].endswith("| +0.5333 +- 0.1434 | smaller |")
    assert told["tiny"].endswith("| +0.6333 +- 0.1434 |  |")


def test_full_size_twins_are_not_run_unless_they_are_named():
    assert choice.STUDY.tasks == ("digits", "vit", "gpt", "encoder", "lora", "unet3d")
    assert all(f"{name}_full" in TASKS for name in choice.STUDY.tasks if name != "digits")

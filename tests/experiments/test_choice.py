"""The study of presets: each way is what its name says, and its peak is a step's."""

from experiments import choice


def test_ways_hold_what_their_names_say(monkeypatch):
    monkeypatch.setattr(choice, "validate", lambda model, source: (0.0, 0.0))  # 40 batches
    ways = ("plain", "checkpointing", "balanced")
    found = {way: choice.train("gpt", way, 0, 1e-3, 2) for way in ways}
    assert set(found["plain"]) | set(choice.KEY) == set(choice.STUDY.columns)
    peaks = {way: row["peak_mib"] for way, row in found.items()}
    assert peaks["balanced"] < 0.4 * peaks["plain"]
    assert peaks["checkpointing"] < 0.7 * peaks["plain"]
    assert found["checkpointing"]["recomputed_blocks"] == 3
    # Nothing is rounded there: after a step the very loss of the plain run.
    assert found["checkpointing"]["train_loss"] == found["plain"]["train_loss"]
    assert set(choice.WAYS) >= {"smallest", "checkpointed", "all_four"}

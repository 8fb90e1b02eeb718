"""Events, by hand, become what is alive at each moment."""

import pytest

from memtrain.audit.peak import Moment, Timeline
from memtrain.audit.peak.timeline import replay


def events_by_hand():
    return [
        (0, 1000, "forward", "start"),
        (1, 600, "forward", "a"),
        (2, 100, "forward", "b"),
        (2, -100, "forward", "b"),
        (3, 50, "backward", "c"),
        (1, -600, "backward", "c"),
        (3, -25, "backward", "c"),
    ]


CATEGORIES = ["weights", "saved activations", "temporaries", "gradients"]


def test_replay_by_hand():
    found = replay(events_by_hand(), CATEGORIES)
    sizes = [(moment.label, moment.phase, moment.nbytes) for moment in found.moments]
    assert sizes == [
        ("start", "forward", 1000),
        ("a", "forward", 1600),
        ("b", "forward", 1700),
        ("c", "backward", 1650),
    ]
    assert found.peak.parts == {"weights": 1000, "saved activations": 600, "temporaries": 100}
    assert found.peak.label == "b"
    without = replay(events_by_hand(), ["weights", "", "temporaries", "gradients"])
    assert without.peak.nbytes == 1100


def test_replay_rounds_as_the_allocator_does_and_adds_workspaces():
    held = {"forward": 7, "backward": 14, "step": 14}
    found = replay(events_by_hand(), CATEGORIES, unit=512, workspaces=held)
    # 1000 takes 1024, 600 takes 1024, 100 takes 512, 50 takes 512.
    assert [m.nbytes for m in found.moments] == [1031, 2055, 2567, 2574]
    assert found.peak.parts["allocator rounding"] == 24 + 424 + 462
    assert found.peak.parts["workspaces"] == 14
    assert found.requested == 1700 + 7


def test_an_empty_timeline_has_no_peak():
    assert Timeline((Moment("a", "step", 0, {}),)).peak.label == "a"
    with pytest.raises(ValueError, match="nothing ran"):
        _ = Timeline(()).peak

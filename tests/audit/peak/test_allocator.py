"""The simulated caching allocator, and what is alive at each moment: cases worked by hand."""

import pytest
import torch

from memtrain.audit.peak import Moment, Timeline
from memtrain.audit.peak.allocator import CachingAllocator, run_steps
from memtrain.audit.peak.allocator import reserved_nbytes as reserved
from memtrain.audit.peak.timeline import NO_STORAGE, replay

KIB, MIB = 2**10, 2**20


def sizes(allocator):
    return allocator.allocated, allocator.reserved


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        # A remainder of 1 MiB at most is not cut off in the large pool.
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (25 * MIB + 1, 26 * MIB, 26 * MIB),
    ],
)
def test_a_request_takes_a_block_of_a_segment(asked, block, segment):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert sizes(allocator) == (block, segment)


def test_the_two_pools_share_no_segment():
    allocator = CachingAllocator()
    large = allocator.allocate(8 * MIB)  # leaves 12 MiB of a segment
    allocator.free(large)
    allocator.allocate(MIB)
    assert allocator.reserved == 22 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    wide, gap, narrow, rest = (allocator.allocate(n * MIB) for n in (6, 2, 4, 8))
    assert allocator.reserved == 20 * MIB
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(3 * MIB).address == narrow.address
    # 1 MiB is left of it, which is not cut off: the block keeps 4 MiB.
    assert allocator.allocated == (2 + 8 + 4) * MIB
    assert gap.used
    assert rest.used


def test_freed_neighbours_merge():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert allocator.allocate(9 * MIB).address == blocks[0].address
    assert sizes(allocator) == (14 * MIB, 20 * MIB)


def test_fragments_are_reserved_and_serve_nothing_larger():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(8 * MIB)
    assert sizes(allocator) == (18 * MIB, 40 * MIB)


def test_free_segments_are_given_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity=64 * MIB)
    first = allocator.allocate(40 * MIB)
    allocator.free(first)
    allocator.allocate(50 * MIB)
    assert sizes(allocator) == (50 * MIB, 50 * MIB)
    kept = allocator.allocate(4 * KIB)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(20 * MIB)
    assert kept.used


def test_expandable_segments_grow_by_pages():
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(25 * MIB) for _ in range(2)]
    assert sizes(allocator) == (50 * MIB, 60 * MIB)  # 40, then 20 more beside the 15 left
    allocator.free(blocks[1])
    allocator.allocate(40 * MIB)
    assert sizes(allocator) == (65 * MIB, 80 * MIB)
    allocator.allocate(4 * KIB)
    assert allocator.reserved == 82 * MIB


def test_an_expandable_segment_gives_pages_back():
    allocator = CachingAllocator(capacity=100 * MIB, expandable=True)
    kept, gone = allocator.allocate(10 * MIB), allocator.allocate(70 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.free(gone)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    assert kept.used


def step(*pairs):
    """Events of a step: storage and bytes that it takes more."""
    return [(storage, delta, "forward", "op") for storage, delta in pairs]


BEGIN = [(NO_STORAGE, 0, "forward", "forward")]


def test_a_step_is_served_twice_from_what_was_there():
    weights = step((0, 30 * MIB))
    body = step((1, 12 * MIB), (2, 12 * MIB), (1, -12 * MIB), (3, 30 * MIB), (2, -12 * MIB))
    events = weights + BEGIN + body
    found = run_steps(events, ["weights", "temporaries", "temporaries", "gradients"])
    assert found.peak_allocated == (30 + 12 + 30) * MIB
    assert found.peak_reserved == (30 + 12 + 12 + 30) * MIB
    # With less, the second step cuts 12 MiB off the block where the gradient was, and finds no
    # place for the next one.
    assert reserved(events, ["weights", "temporaries", "temporaries", "gradients"]) == 84 * MIB


def test_states_that_a_step_replaces_are_not_counted_twice():
    events = step((0, 20 * MIB)) + BEGIN + step((1, 20 * MIB), (0, -20 * MIB))
    found = run_steps(events, ["optimizer states", "optimizer states"])
    assert sizes(found) == (20 * MIB, 40 * MIB)
    assert found.peak_allocated == 40 * MIB


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
    assert [(moment.label, moment.phase, moment.nbytes) for moment in found.moments] == [
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

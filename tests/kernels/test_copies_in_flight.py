"""Memory that leaves a device is given away once, whichever of several threads comes first."""

from collections import deque
from types import SimpleNamespace

import pytest

from memtrain.kernels.copies_in_flight import AT_ONCE, CopiesInFlight


class Raced(deque):
    """Another thread gives all away, between a look and what follows it."""

    def __len__(self):
        seen = super().__len__()
        self.clear()
        return seen


def in_flight():
    waited = []
    held, stream = CopiesInFlight(), SimpleNamespace(wait_event=waited.append)
    for copied in range(AT_ONCE):
        held.add(stream, copied, object())
    return held, waited


def test_a_stream_waits_for_each_copy_in_order():
    held, waited = in_flight()
    held.make_room()
    assert waited == [0]
    held.clear()
    held.clear()
    assert waited == [*range(AT_ONCE)]


@pytest.mark.parametrize("give", [CopiesInFlight.make_room, CopiesInFlight.clear])
def test_what_another_thread_gives_away_meanwhile_is_passed_over(give):
    held, waited = in_flight()
    held._held = Raced(held._held)
    give(held)
    assert waited == []

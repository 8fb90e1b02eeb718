"""Runs that are broken off at a step, and the sessions that continue them."""

from contextlib import contextmanager
from unittest.mock import patch

from memtrain.training import checkpoint
from memtrain.training.run import Run
from memtrain.training.session import Session
from memtrain.training.settings import from_mapping


@contextmanager
def at_step(number, act, name=None):
    """Call `act` before a step, counted from 1, of every run or of the one of this name."""
    train_step = Run.train_step

    def acting(self):
        if self.step + 1 == number and name in (None, self.name):
            act()
        return train_step(self)

    with patch.object(Run, "train_step", acting):
        yield


def killed():
    """End a run as a process that is killed ends it."""
    raise MemoryError("killed")


def resumed(folder):
    """Return a session that continues from a folder's checkpoint."""
    state = checkpoint.read_checkpoint(folder)
    return Session(from_mapping(state["config"]), state=state)

"""Whose turn it is: one thread's forward at a time, and one interception's while a trace runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memtrain.activations.intercept.executor import top_hooks
from memtrain.activations.saved.origin import in_transform

_only: object | None = None  # while a trace runs, live interceptions sleep


def sleeps(interception: object) -> bool:
    """Whether another interception has the forward to itself."""
    return _only is not None and _only is not interception


@contextmanager
def awake(interception: object) -> Iterator[None]:
    """Inside the block every other interception sleeps."""
    global _only
    outer, _only = _only, interception
    try:
        yield
    finally:
        _only = outer


def saves() -> bool:
    """Whether what runs now saves tensors for a backward that comes later."""
    # in a backward it is reentrant checkpointing that recomputes
    backward = torch._C._current_graph_task_id() != -1
    return torch.is_grad_enabled() and not torch.jit.is_tracing() and not backward


def foreign_hooks() -> str:
    """Why saved tensors are not ours to pack, or an empty string."""
    if top_hooks() is not None:
        return "saved-tensor hooks of someone else are on"
    if in_transform():
        return "inside a transform of torch.func or forward-mode differentiation"
    return ""


class Turn:
    """The thread whose forward runs; others wait for no one, and are left alone."""

    def __init__(self) -> None:
        self._thread: dict[str, int] = {}

    def claim(self) -> bool:
        """Whether the forward is this thread's, which it becomes where it is no one's."""
        own = threading.get_ident()
        return self._thread.setdefault("ident", own) == own  # at once: no thread comes between

    def mine(self) -> bool:
        """Whether this thread has claimed it."""
        return self._thread.get("ident") == threading.get_ident()

    def died(self) -> bool:
        """Whether the thread that claimed it ended in its forward."""
        own = self._thread.get("ident")
        return own is not None and all(other.ident != own for other in threading.enumerate())

    def leave(self) -> None:
        """The forward has ended."""
        self._thread.clear()

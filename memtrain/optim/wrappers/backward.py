"""The backward that brings gradients: when it ends, and whether an error broke it off."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]


class Backward:
    """Watches the backward in which gradients arrive.

    Example:
        >>> backward, weight = Backward(), torch.ones(1, requires_grad=True)
        >>> def arrived(weight):
        ...     assert not backward.entered(lambda: print("ended"))
        >>> handle = weight.register_post_accumulate_grad_hook(arrived)
        >>> (2 * weight).backward()
        ended
        >>> backward.broke_off
        False
    """

    def __init__(self) -> None:
        self._end: weakref.ref[_End] | None = None
        self._broke_off = False

    def entered(self, at_end: Callable[[], None]) -> bool:
        """Record that a gradient arrives in the current thread.

        Args:
            at_end: Called once when this backward ends, with the caller's streams current. It is
                not called where the backward raises, nor outside of a backward.

        Returns:
            Whether this is a backward after one that broke off.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        end = None if self._end is None else self._end()
        if end is None or end.task != task:
            self._broke_off = self.broke_off
            end = _End(self, task, at_end)
            self._end = weakref.ref(end)
            _engine.queue_callback(end)
        return self._broke_off

    def ended(self, task: int) -> None:
        """Record that the backward of this graph task has ended."""
        end = None if self._end is None else self._end()
        if end is not None and end.task == task:
            self._end = None

    @property
    def broke_off(self) -> bool:
        """Whether a backward that brought gradients raised before its end, since `forget`."""
        return self._broke_off or (self._end is not None and self._end() is None)

    def refused(self) -> None:
        """Count the backward that runs as ended: its error says what to do."""
        self._end = None

    def forget(self) -> None:
        """The next backward begins a step."""
        self._end, self._broke_off = None, False


class _End:
    """Called by autograd when a backward ends; freed without a call where that raises."""

    def __init__(self, backward: Backward, task: int, at_end: Callable[[], None]) -> None:
        self.task, self._backward, self._at_end = task, backward, at_end

    def __call__(self) -> None:
        self._backward.ended(self.task)
        self._at_end()

"""Device memory that is being copied to the host, and when it may be reused."""

from collections import deque
from typing import Any

AT_ONCE = 2
"""Copies to the host that may be unfinished when another one starts."""


class CopiesInFlight:
    """Tensors of a device that are being copied to the host.

    Each tensor is kept until its own stream waits for the copy. `record_stream` would wait until
    the host has *seen* a copy end. A host that runs ahead of the device sees no copy end before it
    waits itself, so that no memory would be reused.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, Any, Any]] = deque()

    def add(self, stream: Any, copied: Any, kept: Any) -> None:
        """Keep the tensors `kept` of a stream until the event `copied` at the end of their copy."""
        self._kept.append((stream, copied, kept))

    def make_room(self) -> None:
        """Release tensors before another copy, so that a host that runs ahead keeps no more."""
        while len(self._kept) >= AT_ONCE:
            self._release()

    def clear(self) -> None:
        """Release all of it."""
        while self._kept:
            self._release()

    def _release(self) -> None:
        try:
            stream, copied, _ = self._kept.popleft()
        except IndexError:  # another thread, in its backward or step, has just released it
            return
        stream.wait_event(copied)

"""Device memory that is being copied to the host, and when it may be reused."""

from collections import deque
from typing import Any

AT_ONCE = 2
"""Copies to the host that may be unfinished when another one starts."""


class CopiesInFlight:
    """Tensors of a device on their way to the host.

    Each is held until the stream that it belongs to has waited for its copy, and not given to
    `record_stream`: that waits until the host has *seen* a copy end, and a host that runs ahead of
    the device sees none before it waits itself, so that nothing would be free again.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Any, Any]] = deque()

    def add(self, stream: Any, copied: Any, held: Any) -> None:
        """Hold what leaves.

        Args:
            stream: The CUDA stream that its memory belongs to.
            copied: The event at the end of its copy.
            held: The tensor, or several.
        """
        self._held.append((stream, copied, held))

    def make_room(self) -> None:
        """Before another copy: else work outruns the bus, however far the host runs ahead."""
        while len(self._held) >= AT_ONCE:
            self._release()

    def clear(self) -> None:
        """Release all of it."""
        while self._held:
            self._release()

    def _release(self) -> None:
        try:
            stream, copied, _ = self._held.popleft()
        except IndexError:  # another thread, in its backward or step, has just released it
            return
        stream.wait_event(copied)

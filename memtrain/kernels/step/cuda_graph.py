"""Steps that a CUDA graph captures: what the kernels read must stay where it was then."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

LIMIT = 8  # launches that no graph has captured: sets of parameters with gradients, say


def capturing() -> bool:
    """Whether the current stream is captured into a graph.

    Example:
        >>> capturing()
        False
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse(owner: str, why: str) -> None:
    """Raise `RuntimeError` inside a capture, for what a replay would not repeat."""
    if capturing():
        raise RuntimeError(f"{owner} cannot be captured into a graph: {why}")


class GraphTables:
    """Launches whose tables stay at their addresses, so that a CUDA graph can replay them.

    A capture only finds launches, it makes none: a table travels to the device from host memory,
    which a graph would not repeat. Those that a graph has captured stay for good; of the others
    the `LIMIT` made last.
    """

    def __init__(self) -> None:
        self._launches: dict[Hashable, Any] = {}
        self._captured: set[Hashable] = set()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The launch of a key.

        Args:
            key: Everything that the launch's tables hold, but for gradients.
            make: Makes it, outside captures.

        Returns:
            The same object for the same key.

        Raises:
            RuntimeError: Inside a capture, for a key that has none yet.
        """
        inside = capturing()
        if key not in self._launches:
            if inside:
                raise RuntimeError(
                    "a capture must repeat a step that was made outside of one: these parameters, "
                    "states and options were not stepped together yet; make a step with a gradient "
                    "for exactly these parameters first"
                )
            spare = [k for k in self._launches if k not in self._captured]
            for old in spare[: max(0, len(spare) + 1 - LIMIT)]:
                del self._launches[old]
            self._launches[key] = make()
        if inside:
            self._captured.add(key)
        return self._launches[key]

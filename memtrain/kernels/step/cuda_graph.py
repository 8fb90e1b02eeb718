"""Keep what a device's kernels read at each step; where a CUDA graph captured it, for good."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from memtrain.kernels.step.uploads import DeviceTable

LIMIT = 8  # launches of a parameter that no graph has captured: it and others with gradients, say
TABLES = 4096  # of launches that no graph may capture: released gradients take one a parameter


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
    the `LIMIT` made last for each parameter, for a step makes one for each kind of them, and the
    `TABLES` made last in all. Of launches that no graph may capture, as the host makes their
    numbers, the tables are kept: the `TABLES` made last.
    """

    def __init__(self) -> None:
        self._launches: dict[Hashable, Any] = {}
        self._params: dict[Hashable, frozenset[int]] = {}  # of a launch
        self._captured: set[Hashable] = set()
        self._tables: dict[Hashable, DeviceTable] = {}

    def get(self, key: Hashable, make: Callable[[], Any], params: Iterable[int]) -> Any:
        """The launch of a key.

        Args:
            key: Everything that the launch's tables hold, but for gradients.
            make: Makes it, outside captures.
            params: Numbers that tell the parameters that it steps.

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
            self._make_room(own := frozenset(params))
            self._launches[key], self._params[key] = make(), own
        if inside:
            self._captured.add(key)
        return self._launches[key]

    def _make_room(self, params: frozenset[int]) -> None:
        """Drop launches that no graph has captured, for one more of some parameters."""
        spare = [key for key in self._launches if key not in self._captured]
        alike = [key for key in spare if not params.isdisjoint(self._params[key])]
        old = {*alike[: max(0, len(alike) + 1 - LIMIT)], *spare[: max(0, len(spare) + 1 - TABLES)]}
        for key in old:
            del self._launches[key], self._params[key]

    def table(self, key: Hashable, size: int, device: torch.device) -> DeviceTable:
        """The table of a key, for numbers that the host makes anew at each step.

        Args:
            key: Tells parameters apart that are stepped together; `size` and `device` follow of it.
            size: Numbers in it.
            device: Where kernels read them.
        """
        if key not in self._tables:
            if len(self._tables) >= TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = DeviceTable(size, device)
        return self._tables[key]

"""The loss scale: what keeps small gradients from being lost in few bits, and when it changes."""

from collections.abc import Mapping
from typing import Any

GROWTH, BACKOFF = 2.0, 0.5
LARGEST, LEAST = 2.0**32, 2.0**-32


class LossScale:
    """A power of two that gradients carry inside the model, from its outputs to its parameters.

    After a backward pass that overflowed it is halved; after `interval` passes in a row that did
    not, doubled.

    Args:
        mode: `dynamic`, `static` or `none` (always 1).
        initial: A power of two.
        interval: Backward passes.

    Example:
        >>> scale = LossScale("dynamic", 8.0, 2)
        >>> for overflow in (True, False, False, False):
        ...     scale.update(overflow=overflow)
        >>> scale.value, scale.overflows
        (8.0, 1)
    """

    def __init__(self, mode: str, initial: float, interval: int) -> None:
        self.mode, self.interval = mode, interval
        self.value = 1.0 if mode == "none" else initial
        self.clean = 0
        """Passes without an overflow since the last change."""
        self.overflows = 0
        """Passes that overflowed so far."""
        self.off = ""
        """Why it is not used although it was asked for."""

    @property
    def active(self) -> bool:
        """Whether gradients are scaled."""
        return self.mode != "none" and not self.off

    def turn_off(self, why: str) -> None:
        """Leave scaling to someone else, for good."""
        self.off, self.value = why, 1.0

    def update(self, *, overflow: bool) -> None:
        """A backward pass has ended."""
        self.overflows += overflow
        if self.mode != "dynamic" or self.off:
            return
        if overflow:
            self.value, self.clean = max(self.value * BACKOFF, LEAST), 0
            return
        self.clean += 1
        if self.clean >= self.interval:
            self.value, self.clean = min(self.value * GROWTH, LARGEST), 0

    def state(self) -> dict[str, Any]:
        """A plain dict that `load` takes."""
        return {
            "value": self.value,
            "clean": self.clean,
            "overflows": self.overflows,
            "off": self.off,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self.value, self.clean = float(state["value"]), int(state["clean"])
        self.overflows, self.off = int(state["overflows"]), str(state["off"])

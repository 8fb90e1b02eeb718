"""Live bytes at each moment of a training step, and the moment of the peak."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["forward", "backward", "step"]
WEIGHTS = "weights"
GRADIENTS = "gradients"
STATES = "optimizer states"
SAVED = "saved activations"
RECOMPUTED = "recomputed activations"
INPUTS = "inputs"
TEMPORARIES = "temporaries"
ALLOCATED = "allocated in the step"
"""All other bytes of a measured step."""
WORKSPACES = "workspaces"
ROUNDING = "allocator rounding"
CACHED = "cached by the allocator"
CONTEXT = "CUDA context"
NOTHING = ""
"""The category of storages that do not count."""
PARTS = (
    *(WEIGHTS, GRADIENTS, STATES, SAVED, RECOMPUTED, INPUTS),
    *(TEMPORARIES, ALLOCATED, WORKSPACES, ROUNDING, CACHED, CONTEXT),
)
"""The parts of a moment, in the order of tables."""
NO_STORAGE = -1
"""The number in an event that only begins another op."""
Event = tuple[int, int, Phase, str]
"""A storage's number or `NO_STORAGE`, the change of its bytes, the phase, and the op."""


@dataclass(frozen=True)
class Moment:
    """The live bytes after an op of a training step.

    Example:
        >>> Moment("forward of h.3.mlp.act / gelu", "forward", 12, {"weights": 8, "inputs": 4})
        Moment(label='forward of h.3.mlp.act / gelu', phase='forward', nbytes=12,
               parts={'weights': 8, 'inputs': 4})
    """

    label: str
    """The op: `forward of h.3.mlp.act / gelu`, `backward of h.3.mlp.act / gelu`, `step`."""
    phase: Phase
    nbytes: int
    """Live bytes."""
    parts: Mapping[str, int]
    """Category of `PARTS` -> its live bytes, without zeros; they sum to `nbytes`."""


@dataclass(frozen=True)
class Timeline:
    """The moments of one training step, in their order.

    Example:
        >>> small, large = Moment("a", "forward", 1, {}), Moment("b", "backward", 2, {})
        >>> Timeline((small, large)).peak.label
        'b'
    """

    moments: tuple[Moment, ...]
    """One moment per op, its highest; consecutive kernels of one op are one moment."""
    reserved: int | None = None
    """On CUDA: bytes that the caching allocator reserves; None on a CPU."""
    context: int = 0
    """On CUDA: bytes of the CUDA context and of loaded kernels."""

    @property
    def peak(self) -> Moment:
        """The moment with most live bytes; the first of equal ones.

        Raises:
            ValueError: If there are no moments.
        """
        if not self.moments:
            raise ValueError("the timeline is empty: nothing ran")
        return max(self.moments, key=lambda moment: moment.nbytes)

    @property
    def needed(self) -> Moment:
        """The peak with all memory that the device must have: the smallest device that fits.

        On CUDA the allocator's unused blocks and the CUDA context are parts; on a CPU it is `peak`.

        Example:
            >>> peak = Moment("step", "step", 100, {"weights": 100})
            >>> Timeline((peak,), reserved=120, context=30).needed.nbytes
            150
        """
        if self.reserved is None:
            return self.peak
        cached = max(0, self.reserved - self.peak.nbytes)
        more = {CACHED: cached, CONTEXT: self.context}
        parts = {**self.peak.parts, **{name: nbytes for name, nbytes in more.items() if nbytes}}
        return replace(self.peak, nbytes=self.peak.nbytes + cached + self.context, parts=parts)

    @property
    def requested(self) -> int:
        """The most requested bytes at any moment, without the allocator's rounding."""
        return max((m.nbytes - m.parts.get(ROUNDING, 0) for m in self.moments), default=0)


def replay(
    events: Iterable[Event],
    categories: Sequence[str],
    *,
    unit: int = 1,
    workspaces: Mapping[Phase, int] | None = None,
) -> Timeline:
    """Sum events to live bytes by category; one moment for each run of events with one label.

    Events before the first op are the live bytes at the start. Each storage is rounded up to a
    multiple of `unit`. `workspaces` are further bytes by phase.

    Example:
        >>> born = (0, 100, "forward", "a"), (1, 30, "forward", "b")
        >>> timeline = replay([*born, (1, -30, "forward", "b")], ["weights", "temporaries"])
        >>> [(moment.label, moment.nbytes) for moment in timeline.moments]
        [('a', 100), ('b', 130)]
    """
    live: dict[str, int] = dict.fromkeys(PARTS, 0)
    sizes: dict[int, int] = {}
    moments: list[Moment] = []
    for storage, delta, phase, label in events:
        if storage != NO_STORAGE:
            if categories[storage] == NOTHING:
                continue
            before = sizes.get(storage, 0)
            sizes[storage] = after = before + delta
            live[categories[storage]] += delta
            live[ROUNDING] += -after % unit - -before % unit
        live[WORKSPACES] = (workspaces or {}).get(phase, 0)
        now = sum(live.values())
        same = bool(moments) and moments[-1].label == label
        if same and now <= moments[-1].nbytes:
            continue
        parts = {name: nbytes for name, nbytes in live.items() if nbytes}
        moment = Moment(label, phase, now, parts)
        moments[-1:] = [moment] if same else [*moments[-1:], moment]
    return Timeline(tuple(moments))

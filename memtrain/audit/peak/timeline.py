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
"""Of a measured step, whose allocator does not report what a block is for."""
WORKSPACES = "workspaces"
ROUNDING = "allocator rounding"
CACHED = "cached by the allocator"
CONTEXT = "CUDA context"
NOTHING = ""
"""The category of storages that do not count."""
PARTS = (
    WEIGHTS,
    GRADIENTS,
    STATES,
    SAVED,
    RECOMPUTED,
    INPUTS,
    TEMPORARIES,
    ALLOCATED,
    WORKSPACES,
    ROUNDING,
    CACHED,
    CONTEXT,
)
"""The parts that a moment may have, in the order to show them."""
NO_STORAGE = -1
"""In place of a storage's number where only another op begins."""


Event = tuple[int, int, Phase, str]
"""A storage's number or `NO_STORAGE`, bytes that it takes more, the phase, and what runs."""


@dataclass(frozen=True)
class Moment:
    """The live bytes when an op of a training step has just run.

    Example:
        >>> Moment("forward of h.3.mlp.act / gelu", "forward", 12, {"weights": 8, "inputs": 4})
        Moment(label='forward of h.3.mlp.act / gelu', phase='forward', nbytes=12,
               parts={'weights': 8, 'inputs': 4})
    """

    label: str
    """Op that runs: `forward of h.3.mlp.act / gelu`, `backward of h.3.mlp.act / gelu`, `step`."""
    phase: Phase
    """`forward`, `backward` or `step`."""
    nbytes: int
    """Bytes alive."""
    parts: Mapping[str, int]
    """Category -> its bytes alive, those of `PARTS` that are not 0; they sum to `nbytes`."""


@dataclass(frozen=True)
class Timeline:
    """The moments of one training step, in their order.

    Example:
        >>> small, large = Moment("a", "forward", 1, {}), Moment("b", "backward", 2, {})
        >>> Timeline((small, large)).peak.label
        'b'
    """

    moments: tuple[Moment, ...]
    """One per op, each at its highest; an op that runs on for several kernels is one."""
    reserved: int | None = None
    """On CUDA: bytes that the caching allocator takes of the device; None on a CPU."""
    context: int = 0
    """On CUDA: bytes of the device that the CUDA context and loaded kernels take."""

    @property
    def peak(self) -> Moment:
        """The moment when most is alive; the first of equal ones.

        Raises:
            ValueError: If there are no moments.
        """
        if not self.moments:
            raise ValueError("the timeline is empty: nothing ran")
        return max(self.moments, key=lambda moment: moment.nbytes)

    @property
    def needed(self) -> Moment:
        """The peak, and what the device must have free for it: the least card that the step fits.

        On CUDA the caching allocator's unused blocks and the CUDA context are parts of it; on a CPU
        it is the peak.

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
        """The most bytes asked for at any moment: without the allocator's rounding."""
        return max((m.nbytes - m.parts.get(ROUNDING, 0) for m in self.moments), default=0)


def replay(
    events: Iterable[Event],
    categories: Sequence[str],
    *,
    unit: int = 1,
    workspaces: Mapping[Phase, int] | None = None,
) -> Timeline:
    """Add events up to what is alive, by category.

    Args:
        events: In their order; those before the first op stand for what is alive at the start.
        categories: Of each storage, by its number.
        unit: The allocator's: each storage takes a multiple of so many bytes.
        workspaces: Bytes that libraries hold besides, by phase.

    Returns:
        One moment for each run of events with the same label.

    Example:
        >>> born = (0, 100, "forward", "a"), (1, 30, "forward", "b")
        >>> timeline = replay([*born, (1, -30, "forward", "b")], ["weights", "temporaries"])
        >>> [(moment.label, moment.nbytes) for moment in timeline.moments]
        [('a', 100), ('b', 130)]
    """
    held: dict[str, int] = dict.fromkeys(PARTS, 0)
    sizes: dict[int, int] = {}
    moments: list[Moment] = []
    for storage, delta, phase, label in events:
        if storage != NO_STORAGE:
            if categories[storage] == NOTHING:
                continue
            before = sizes.get(storage, 0)
            sizes[storage] = after = before + delta
            held[categories[storage]] += delta
            held[ROUNDING] += -after % unit - -before % unit
        held[WORKSPACES] = (workspaces or {}).get(phase, 0)
        now = sum(held.values())
        same = bool(moments) and moments[-1].label == label
        if same and now <= moments[-1].nbytes:
            continue
        parts = {name: nbytes for name, nbytes in held.items() if nbytes}
        moment = Moment(label, phase, now, parts)
        moments[-1:] = [moment] if same else [*moments[-1:], moment]
    return Timeline(tuple(moments))

"""One row of a plan."""

from dataclasses import dataclass

UNKNOWN = "unknown: "
"""How the reason of a row begins whose bytes cannot be told before the run."""


@dataclass(frozen=True)
class Entry:
    """What is done to one site.

    Example:
        >>> Entry("wte.weight / adamw / exp_avg", "state", 4096, 544, "Block()").planned
        544
    """

    site: str
    kind: str
    """`activation`, `state`, `weight` or `gradient`."""
    nbytes: int
    """Bytes without memtrain."""
    planned: int
    """Bytes with the plan."""
    compressor: str = ""
    """Empty where the site is kept as it is."""
    reason: str = ""
    """Why it is kept, or a note."""

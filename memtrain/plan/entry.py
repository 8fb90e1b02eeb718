"""One row of a plan."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memtrain.activations.saved.site import Record, Site

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

    @property
    def comment(self) -> str:
        """Bytes, and the reason to keep, for people.

        Example:
            >>> Entry("h.0 / gelu / input", "activation", 4096, 544, "Group()").comment
            '4,096 B -> 544 B'
        """
        replaced = self.nbytes == self.planned
        sides = f"{self.planned:,} B" if replaced else f"{self.nbytes:,} B -> {self.planned:,} B"
        return f"{sides}; {self.reason}" if self.reason else sides


def merge(records: Iterable[Record]) -> Iterator[Entry]:
    """One entry for each site of a forward: the sums over its saves.

    Args:
        records: What the forward saved; a site may be in them several times.

    Returns:
        Entries of kind `activation`, in the order in which sites came first.
    """
    sites: dict[Site, list[Record]] = {}
    for record in records:
        sites.setdefault(record.site, []).append(record)
    for site, rows in sites.items():
        shown = next((row for row in rows if row.compressor), rows[0])
        yield Entry(
            site.name,
            "activation",
            sum(row.nbytes for row in rows),
            sum(row.planned for row in rows),
            shown.compressor,
            "" if shown.compressor else shown.reason,
        )

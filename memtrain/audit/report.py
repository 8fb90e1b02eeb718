"""What an audit tells: rows, their sums, what was kept and why, and the step's timeline."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memtrain.audit.peak.timeline import Timeline

CATEGORIES = {
    "weight": "weights",
    "gradient": "gradients",
    "state": "optimizer states",
    "activation": "saved activations",
}
"""Kind of a row -> the name of its category."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sites that stand for the same memory, mostly one, and their bytes."""

    name: str
    """Of the site with most planned bytes; `(+n)` where n more belong to it."""
    kind: str
    """`weight`, `gradient`, `state` or `activation`."""
    plain: int
    """Bytes in plain PyTorch."""
    planned: int
    """Bytes with the plan."""
    compressor: str = ""
    """Empty where all is kept; `payload` where the op is replaced by one that saves codes;
    `derived` where the tensor is computed again from another one's payload."""
    reason: str = ""
    """Why it is kept, or a note."""
    sites: tuple[str, ...] = ()
    """The names of all its sites."""

    @property
    def ratio(self) -> float | None:
        """Planned through plain; None where there is nothing in plain PyTorch."""
        return self.planned / self.plain if self.plain else None


@dataclass(frozen=True, kw_only=True)
class Total:
    """Bytes of a category."""

    plain: int
    """Bytes in plain PyTorch."""
    planned: int
    """Bytes with the plan."""
    unknown: str = ""
    """Why bytes are missing, if some could not be told."""

    @property
    def ratio(self) -> float | None:
        """Planned through plain; None where there is nothing in plain PyTorch."""
        return self.planned / self.plain if self.plain else None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was not compressed for one reason."""

    kind: str
    """`weight`, `gradient`, `state` or `activation`."""
    reason: str
    """Why."""
    nbytes: int
    """Bytes kept."""
    count: int
    """Tensors."""
    example: str
    """The site that keeps most."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The audit of a model, its optimizer and a batch under a plan.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from memtrain.audit.audit import audit
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> report = audit(model, torch.optim.AdamW(model.parameters()), torch.ones(32, 64))
        >>> {name: (total.plain, total.planned) for name, total in report.totals().items()}
        {'weights': (132352, 132352), 'gradients': (132352, 132352),
         'optimizer states': (264720, 38928), 'saved activations': (65536, 7296),
         'total': (594960, 310928)}
    """

    rows: tuple[Row, ...]
    """Every row, in the order of the model and its forward."""
    kept: tuple[Kept, ...]
    """What the plan did not compress, most bytes first."""
    unmatched: tuple[str, ...]
    """Rules that matched nothing."""
    loss: bool
    """Whether the batch brings labels, so that the loss's saved tensors are counted."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Kind -> why its bytes could not be told."""
    timeline: Timeline | None = None
    """What is alive at each moment of a step of plain PyTorch, where it was asked for."""
    planned_timeline: Timeline | None = None
    """The same with the plan."""
    measured: Timeline | None = None
    """Of a real step of plain PyTorch, where it was asked for."""
    planned_measured: Timeline | None = None
    """Of a real step with the plan."""

    def totals(self) -> dict[str, Total]:
        """Bytes by category, and `total`.

        Returns:
            Category's name -> its bytes; what is unknown is left out of the sum and marked.
        """
        sums = {}
        for kind, name in CATEGORIES.items():
            rows = [row for row in self.rows if row.kind == kind]
            sums[name] = _total(rows, self.unknown.get(kind, ""))
        sums["total"] = _total(self.rows, "; ".join(self.unknown.values()))
        return sums

    def largest(self, count: int, kind: str = "") -> list[Row]:
        """The rows with most plain bytes; equal ones in the order of the model and its forward.

        Args:
            count: How many.
            kind: Of one kind only; of all by default.

        Returns:
            At most `count` rows.
        """
        rows = [row for row in self.rows if kind in ("", row.kind)]
        return sorted(rows, key=lambda row: -max(row.plain, row.planned))[:count]


def _total(rows: Iterable[Row], unknown: str) -> Total:
    sides = [(row.plain, row.planned) for row in rows]
    return Total(plain=sum(s[0] for s in sides), planned=sum(s[1] for s in sides), unknown=unknown)

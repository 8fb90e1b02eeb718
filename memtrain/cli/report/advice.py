"""What to do about what is left: the parts of the planned bytes that something would shrink."""

from collections.abc import Iterator

from memtrain.audit.report import Report
from memtrain.cli.report.outcome import Outcome
from memtrain.cli.report.peak import at_peak
from memtrain.config.sizes import format_size

LEAST = 0.1
"""A smaller share of the planned bytes is not worth a line."""
_REMEDIES = {
    "weights": "weights=bf16+8 keeps float32 weights in 3 bytes",
    "gradients": "gradients=release lets each go as soon as it is used",
    "optimizer states": "preset=balanced keeps them in 4 bits",
    "saved activations": "preset=smallest or checkpointed, or a smaller batch",
    "temporaries": "a smaller batch, shorter sequences or smaller images",
}
_ONCE = ("weights", "gradients", "optimizer states")
"""Where nothing is advised that the plan does already."""


def verdict(outcome: Outcome) -> Iterator[str]:
    """Whether plain PyTorch fits the budget, what holds it if not, and whether the plan does.

    Args:
        outcome: What was found; without a budget or a peak there is nothing to say.

    Yields:
        Lines.
    """
    parts, fit = at_peak(outcome.report), outcome.fit
    if fit is None or not parts:
        return
    size, plain = format_size(fit.budget), parts["total"].plain
    if plain <= fit.budget:
        yield f"plain PyTorch fits {size} as it is: {format_size(plain)} at its peak"
    else:
        held = sorted((name for name in parts if name != "total"), key=lambda n: -parts[n].plain)
        most = " and ".join(f"{name} ({format_size(parts[name].plain)})" for name in held[:2])
        yield (
            f"plain PyTorch does not fit {size}: it takes {format_size(plain)} at its peak, "
            f"most of it {most}"
        )
    planned = parts["total"].planned
    fits = "fits" if planned <= fit.budget else "does not fit"
    yield f"with the plan it {fits}: {format_size(planned)}"


def advice(report: Report) -> Iterator[str]:
    """The largest parts of the planned peak (of the planned total without one), with remedies.

    Args:
        report: The audit.

    Yields:
        Lines, the largest share first; what the plan compresses already is not advised again.

    Example:
        >>> from memtrain.audit.report import Row
        >>> row = Row(name="w", kind="gradient", plain=8, planned=8)
        >>> list(advice(Report(rows=(row,), kept=(), unmatched=(), loss=True)))
        ['gradients, 100%: gradients=release lets each go as soon as it is used']
    """
    parts = at_peak(report) or report.totals()
    whole = parts["total"].planned
    ordered = sorted(_REMEDIES, key=lambda name: -parts[name].planned if name in parts else 0)
    for name in ordered:
        if name not in parts or not whole or parts[name].planned / whole < LEAST:
            continue
        if name in _ONCE and (parts[name].ratio or 1.0) < 1:
            continue
        yield f"{name}, {parts[name].planned / whole:.0%}: {_REMEDIES[name]}"

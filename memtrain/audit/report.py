"""The audit: the bytes of a training step, site by site, without and with a plan."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.activations.intercept.compiler_internals import inside_compiled
from memtrain.activations.intercept.recompute import NO_BLOCKS, recomputed
from memtrain.activations.saved.options import Options
from memtrain.activations.saved.site import RECOMPUTE, Record, Site
from memtrain.activations.trace.call_arguments import check_order
from memtrain.activations.trace.fake_copies import caches_cleared
from memtrain.activations.trace.fake_forward import trace
from memtrain.audit.join import join
from memtrain.audit.peak.measure import measure as measure_peak
from memtrain.audit.peak.predict import (
    MEASURE,
    UnpredictableError,
    check_compiled,
    conditions,
    explain_fake_errors,
    predict,
)
from memtrain.audit.peak.timeline import Timeline
from memtrain.audit.peak.training_step import StepOptions, check_batch, default_optimizer
from memtrain.compressors import Compressor, Identity, Keep
from memtrain.config.sizes import format_size
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.plan.plan import Plan, make_plan
from memtrain.plan.predicted_bytes import UNKNOWN, PlanEntry
from memtrain.plan.rules import NO_RULE

CATEGORIES = {
    "weight": "weights",
    "gradient": "gradients",
    "state": "optimizer states",
    "activation": "saved activations",
}
"""Kind of a row -> the name of its category."""
_LEFT = {"compressor": "", "reason": NO_RULE.reason}  # of saved tensors, by a plan without rules
_SHOWN = 5
"""Rows of each kind that `print` shows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sites that stand for the same memory, mostly one, and their bytes."""

    name: str
    """Name of the site with most planned bytes; `(+n)` for n further sites."""
    kind: str
    """`weight`, `gradient`, `state` or `activation`."""
    plain: int
    """Bytes of the baseline."""
    planned: int
    """Bytes with the plan."""
    compressor: str = ""
    """Empty for kept tensors; `payload` for a replaced op, which saves codes; `derived` for tensors
    that are recomputed from another payload."""
    reason: str = ""
    """The reason for keeping the tensors, or a note."""
    sites: tuple[str, ...] = ()
    """The names of all sites."""

    @property
    def ratio(self) -> float | None:
        """Planned bytes relative to the baseline's; None if the baseline has none."""
        return self.planned / self.plain if self.plain else None


@dataclass(frozen=True, kw_only=True)
class Total:
    """Bytes of a category."""

    plain: int
    """Bytes of the baseline."""
    planned: int
    """Bytes with the plan."""
    unknown: str = ""
    """Why bytes are missing, if some are unknown."""

    @property
    def ratio(self) -> float | None:
        """Planned bytes relative to the baseline's; None if the baseline has none."""
        return self.planned / self.plain if self.plain else None


@dataclass(frozen=True, kw_only=True)
class KeptTensors:
    """Tensors that are kept for one reason."""

    kind: str
    """`weight`, `gradient`, `state` or `activation`."""
    reason: str
    nbytes: int
    """Kept bytes."""
    count: int
    """Number of tensors."""
    example: str
    """The site with most bytes."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The audit of a model, its optimizer and a batch under a plan.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> report = audit(model, torch.ones(32, 64))
        >>> {name: (total.plain, total.planned) for name, total in report.totals().items()}
        {'weights': (132352, 132352), 'gradients': (132352, 132352),
         'optimizer states': (264720, 22544), 'saved activations': (65536, 7424),
         'total': (594960, 294672)}
    """

    rows: tuple[Row, ...]
    """Every row, in the order of the model and its forward."""
    kept: tuple[KeptTensors, ...]
    """The tensors that the plan did not compress, by reason, most bytes first."""
    unmatched: tuple[str, ...]
    """Rules that matched no site."""
    loss: bool
    """Whether the batch has labels, so that the loss's saved tensors count."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Kind -> the reason why its bytes are unknown."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Category -> bytes in host memory with the plan, which are in no row and no timeline of a
    device; only with `optim.device=cpu`."""
    timeline: Timeline | None = None
    """A predicted baseline step, if requested."""
    planned_timeline: Timeline | None = None
    """A predicted step with the plan."""
    measured: Timeline | None = None
    """A measured baseline step, if requested."""
    planned_measured: Timeline | None = None
    """A measured step with the plan."""

    def __str__(self) -> str:
        rows = [("", "plain", "planned")]
        kinds = sorted(self.totals().items(), key=lambda pair: pair[0] != "saved activations")
        rows += [(name, format_size(t.plain), format_size(t.planned)) for name, t in kinds]
        titles = ("largest saved activations", "activation"), ("largest states", "state")
        for title, kind in titles:
            found = self.largest(_SHOWN, kind)
            rows += [(title, "", "")] if found else []
            rows += [(f"  {r.name}", format_size(r.plain), format_size(r.planned)) for r in found]
        lines = (f"{name:54}{plain:>12}{planned:>12}" for name, plain, planned in rows)
        return "\n".join(map(str.rstrip, lines))

    def totals(self) -> dict[str, Total]:
        """Return bytes by category, and `total`; unknown bytes are marked and left out."""
        kinds = {name: (kind,) for kind, name in CATEGORIES.items()}
        return {
            name: Total(
                plain=sum(row.plain for row in self.rows if row.kind in of),
                planned=sum(row.planned for row in self.rows if row.kind in of),
                unknown="; ".join(self.unknown[kind] for kind in of if kind in self.unknown),
            )
            for name, of in {**kinds, "total": tuple(CATEGORIES)}.items()
        }

    def largest(self, count: int, kind: str = "") -> list[Row]:
        """Return the `count` largest rows of a kind, or of all kinds."""
        rows = [row for row in self.rows if kind in ("", row.kind)]
        return sorted(rows, key=lambda row: -max(row.plain, row.planned))[:count]


@caches_cleared()
def audit(
    model: nn.Module,
    batch: Any,
    cfg: Any = None,
    *,
    optimizer: Optimizer | None = None,
    peak: bool = False,
    measure: bool = False,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Report:
    """Predict the bytes of a training step, with and without a plan.

    Two forwards run on fake tensors, one without memtrain and one under the plan, in the model's
    mode (train or eval). Optimizer states come from the optimizer's first step on fake tensors.
    Rows and totals do not include temporaries, tensors that a backward allocates, and the loss if
    the model does not compute it. Timelines include them.

    Compiled parts are recompiled on copies, and the report counts the tensors that the graphs keep.

    Args:
        model: Real, on the meta device, or built under a `FakeTensorMode`, compiled or not; not
            changed.
        batch: The model's input: a tensor, a tuple of arguments or a dict of keyword arguments,
            real or fake.
        cfg: Anything that `memtrain.config.load` takes; `balanced` by default.
        optimizer: By default `torch.optim.AdamW` for the trained parameters; not changed.
        peak: Also simulate a full step, with and without the plan, for the report's timelines
            (`memtrain.audit.peak.predict`).
        measure: Also run real steps, with and without the plan, and restore the model
            (`audit.peak.measure`). If a prediction is not possible, the report then omits saved
            activations and predicted timelines, with the reason, instead of raising an error.
        options: Options of the step: the device, autocast, and the timelines' loss.

    Returns:
        The report. Its rows sum exactly to the bytes of each category.

    Raises:
        ValueError: If the model has no parameters, if the config is not valid, or if fake tensors
            cannot run the model (the message names the op) and `measure` is False.
        TypeError: If the config has a wrong type, or the batch has no tensor.

    Memory:
        Fake tensors allocate no data: the memory of the rows does not depend on the model's width.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        >>> report = audit(model, torch.ones(32, 64), "balanced")
        >>> [(row.name, row.plain, row.planned) for row in report.largest(1, "activation")]
        [('1 / gelu / input', 32768, 3072)]
    """
    check_order(model, batch)
    check_batch(batch)
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters: nothing is trained")
    optimizer = default_optimizer(model) if optimizer is None else inner_optimizer(optimizer)
    called = model
    model = inside_compiled(called) or called
    plan = make_plan(model, optimizer, cfg)
    recomputes = recomputed(model, plan.options.recompute)
    choices: dict[Site, Compressor | Keep] = {}
    plain, planned, unseen = list[Record](), list[Record](), ""
    try:
        check_compiled(called, options)
        with explain_fake_errors(model), conditions(model, options):
            everything = Options(min_elements=0)
            plain = trace(called, batch, lambda site: Identity(), everything, plain=True)
            planned = (
                plan.trace(called, batch, choices)
                if plan.compresses
                else [record._replace(planned=record.nbytes, **_LEFT) for record in plain]
            )
    except UnpredictableError as error:
        if not measure:
            raise
        plain, planned, unseen = [], [], str(error).removesuffix(MEASURE).rstrip(":; ")
    entries = [*plan.entries("weight")]
    entries += [
        PlanEntry(name, "weight", buffer.nbytes, buffer.nbytes, reason="a buffer")
        for name, buffer in model.named_buffers()
    ]
    entries += [*plan.entries("gradient"), *plan.entries("state")]
    known = [entry for entry in entries if not entry.reason.startswith(UNKNOWN)]
    sites = {*choices, *(record.site for record in planned)}
    rows = [
        Row(
            name=entry.site,
            kind=entry.kind,
            plain=entry.nbytes,
            planned=entry.planned,
            compressor=entry.compressor,
            reason=entry.reason,
            sites=(entry.site,),
        )
        for entry in known
    ]
    report = Report(
        rows=(*rows, *activation_rows(plain, planned, recomputes)),
        kept=tuple(_kept(known, planned)),
        unmatched=() if unseen else tuple(_unmatched(plan, sites)),
        loss=isinstance(batch, Mapping) and "labels" in batch,
        host=_on_host(entries),
        unknown={
            entry.kind: entry.reason.removeprefix(UNKNOWN)
            for entry in entries
            if entry.reason.startswith(UNKNOWN)
        }
        | ({"activation": unseen} if unseen else {}),
    )
    if peak and not unseen:
        with suppress(UnpredictableError) if measure else nullcontext():
            timeline = predict(called, optimizer, batch, None, options)
            planned_timeline = predict(called, optimizer, batch, plan.config, options)
            report = replace(report, timeline=timeline, planned_timeline=planned_timeline)
    if measure:
        measured = measure_peak(called, optimizer, batch, None, options)
        planned_measured = measure_peak(called, optimizer, batch, plan.config, options)
        report = replace(report, measured=measured, planned_measured=planned_measured)
    return report


def _on_host(entries: Iterable[PlanEntry]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES.values(), 0)
    for entry in entries:
        sums[CATEGORIES[entry.kind]] += entry.host
    return {name: nbytes for name, nbytes in sums.items() if nbytes}


def activation_rows(
    plain: Sequence[Record], planned: Sequence[Record], recomputes: Sequence[str] = ()
) -> list[Row]:
    """Join two traces of one forward to rows; every byte of both is in exactly one row.

    `recomputes` are the recomputed modules.
    """
    joined = join(plain, planned)
    number = {site: index for index, sites in enumerate(joined) for site in sites}
    records: dict[int, list[Record]] = {}
    for record in sorted(planned, key=lambda record: -record.planned):
        records.setdefault(number.get(record.site, -1), []).append(record)
    found = []
    for index, sites in enumerate(joined):
        joined_records, first = records.get(index, []), next(iter(sites))
        inside = any(f"{first.module}.".startswith(f"{name}.") or not name for name in recomputes)
        compressor = next((r.compressor for r in joined_records if r.compressor), "")
        more = f" (+{len(sites) - 1})" if len(sites) > 1 else ""
        row = Row(
            name=f"{first.name}{more}",
            kind="activation",
            plain=sum(plain for plain, _ in sites.values()),
            planned=sum(planned for _, planned in sites.values()),
            compressor=compressor or RECOMPUTE * inside,
            reason=next((r.reason for r in joined_records if not r.compressor), ""),
            sites=tuple(site.name for site in sites),
        )
        found.append(row)
    return found


def _kept(entries: Iterable[PlanEntry], planned: Iterable[Record]) -> list[KeptTensors]:
    """Return the kept tensors by kind and reason."""
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    rows = [(e.kind, e.reason, e.planned, e.site) for e in entries if not e.compressor]
    rows += [("activation", r.reason, r.planned, r.site.name) for r in planned if not r.compressor]
    for kind, reason, nbytes, site in rows:
        groups.setdefault((kind, reason), []).append((nbytes, site))
    kept = [
        KeptTensors(
            kind=kind,
            reason=reason,
            nbytes=sum(nbytes for nbytes, _ in found),
            count=len(found),
            example=max(found, key=lambda pair: pair[0])[1],
        )
        for (kind, reason), found in groups.items()
    ]
    return sorted(kept, key=lambda group: -group.nbytes)


def _unmatched(plan: Plan, sites: set[Site]) -> list[str]:
    """Return the user's rules that matched no site, and unknown sites of a plan file."""
    known = {site.name for site in sites}
    return [
        *([f"activations.recompute: {NO_BLOCKS}"] if plan.no_blocks else ()),
        *(f"activations.sites: {x}" for x in plan.config.activations.sites if x not in known),
        *plan.idle_exceptions(sites),
    ]

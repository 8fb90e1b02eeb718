"""`memtrain-report`: where every byte of a training step would go, plain and planned."""

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memtrain.cli.parser import Parser

if TYPE_CHECKING:
    from memtrain.audit import Kept, Report, Row, Total
    from memtrain.cli.models import Request
    from memtrain.config import Config

HELP = """\
usage: memtrain-report model=NAME [key=value ...] [--json FILE] [--top N]

Predict the bytes of a training step without running it: weights, gradients,
optimizer states and saved activations, in plain PyTorch and under a plan. No
weight is allocated.

examples:
  memtrain-report model=gpt2 preset=balanced batch=8 seq=1024
  memtrain-report model=llama-7b dtype=bfloat16 seq=2048     takes seconds
  memtrain-report model=gpt2 attention=eager dropout=0 labels=false
  memtrain-report model=resnet50 batch=32 image=224 optimizer=sgd
  memtrain-report model=gpt2 preset=smallest activations.min_elements=2048
  memtrain-report model=hf:path/to/config.json    a transformers config
  memtrain-report model=py:my_package.module:build    your model and batch
  memtrain-report model=gpt2 --json report.json --top 30

models: {models}

keys:
  model, batch, seq (text), image (its height and width)
  dtype      float32, bfloat16, float16
  labels     true: the loss's saved tensors count; false: they do not
  attention  eager, sdpa
  dropout    0 turns every dropout of a transformers config off
  optimizer  {optimizers}
  preset     {presets}
  and any key of memtrain's config

options:
  --json FILE  also write the report as JSON (docs/report.md describes it)
  --top N      how many of the largest sites to show (10)
  --gradients  build the model for real, run one batch, and tell what the plan
               does to its gradient, as a whole and site by site (takes a
               training step's memory, and some passes a site)

exit status: 0 done, 1 the model could not be traced, 2 wrong arguments
"""
SCHEMA = "memtrain-report"
VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point.

    Args:
        argv: Without the program's name; `sys.argv`'s by default.

    Returns:
        The exit status.

    Example:
        >>> main(["model=gpt3"])
        2
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        if {"-h", "--help"} & set(argv) or not argv:
            console.out(_help(), end="", highlight=False)
            return 0
        arguments = _parse(argv)
        with errors.status("reading the request"):
            request, config = _requested(arguments.overrides)
            _writable(arguments.json)
        with errors.status(f"building {escape(request.model)} without its weights"):
            from memtrain.cli.models import build

            built = build(request)
    except (ValueError, TypeError, ImportError, OSError) as error:
        errors.print(f"memtrain-report: {error}", markup=False)
        return 2
    try:
        with errors.status("tracing the forward, plain and planned"):
            from memtrain.audit import audit

            report = audit(built.model, built.optimizer, built.batch, config)
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:  # noqa: BLE001
        why = str(error).splitlines()[0] if str(error) else ""
        errors.print(f"memtrain-report: {type(error).__name__}: {why}", markup=False)
        return 1
    settings = _settings(request, arguments.overrides, built.batch)
    show(console, report, settings, arguments.top)
    if arguments.gradients:
        from memtrain.cli.gradients import gradients

        with errors.status("measuring the gradient"):
            console.print(gradients(request, config).table(arguments.top))
    if arguments.json is not None:
        try:
            write_json(arguments.json, report, settings)
        except OSError as error:
            errors.print(f"memtrain-report: {error}", markup=False)
            return 2
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="memtrain-report", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--gradients", action="store_true")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.top < 1:
        raise ValueError(f"--top {arguments.top} is out of range; allowed: 1 or more")
    return arguments


def _requested(overrides: list[str]) -> "tuple[Request, Config]":
    """The report's own keys, and memtrain's."""
    from omegaconf import OmegaConf

    from memtrain.cli.models import FAMILIES, Request
    from memtrain.config import Config, load, nearest, options
    from memtrain.experiments.config import typed

    own = {item.name for item in dataclasses.fields(Request)}
    theirs = {item.name for item in dataclasses.fields(Config)}
    for item in overrides:
        key, sign, _ = item.lstrip("+~").partition("=")
        top = key.split(".")[0]
        if not sign or top not in own | theirs:
            fault = "unknown key" if sign else "no key=value:"
            raise ValueError(f"{fault} {key!r}; {nearest(key, sorted(own | theirs))}")
    mine = [item for item in overrides if item.partition("=")[0].split(".")[0] in own]
    request = typed(Request, OmegaConf.from_dotlist(mine), "")  # type: ignore[arg-type]
    if not request.model:
        names = [*FAMILIES, "hf:<path>", "py:<module>:<builder>"]
        raise ValueError(f"model= is missing; allowed: {', '.join(names)}")
    rest = [item for item in overrides if item not in mine]
    preset = [item for item in rest if item.startswith("preset=")]
    if preset and preset[-1].partition("=")[2] not in options("preset"):
        value = preset[-1].partition("=")[2]
        raise ValueError(f"unknown preset {value!r}; {nearest(value, options('preset'))}")
    return request, load(rest)


def _settings(request: "Request", overrides: list[str], batch: Any) -> dict[str, Any]:
    """What the report was made for, as shown and as written."""
    own = dataclasses.asdict(request)
    names = tuple(own)
    if isinstance(batch, dict):  # a size that was left open is the model's own
        for name, tensor in (("seq", "input_ids"), ("image", "pixel_values")):
            own[name] = batch[tensor].shape[-1] if tensor in batch else own[name]
    own = {name: value for name, value in own.items() if value is not None}
    rest = [item for item in overrides if item.partition("=")[0] not in names]
    preset = [item.partition("=")[2] for item in rest if item.startswith("preset=")]
    others = [item for item in rest if not item.startswith("preset=")]
    return {**own, "preset": [*preset, "balanced"][0], "overrides": others}


def _writable(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(f"cannot write --json {str(path)!r}: no such folder, or not writable")


def write_json(path: Path, report: "Report", settings: dict[str, Any]) -> None:
    """Write the report, whole or not at all (schema: docs/report.md).

    Args:
        path: The file; an older one is replaced.
        report: The audit.
        settings: What it was made for.

    Raises:
        OSError: If it cannot be written; names the path.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(as_json(report, settings), indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(f"cannot write --json {str(path)!r}: {error}") from error


def as_json(report: "Report", settings: dict[str, Any]) -> dict[str, Any]:
    """The report as JSON values, version 1 of the schema in docs/report.md."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "settings": settings,
        "loss_counted": report.loss,
        "categories": {
            name: {**dataclasses.asdict(total), "ratio": total.ratio}
            for name, total in report.totals().items()
        },
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in report.rows],
        "kept": [dataclasses.asdict(kept) for kept in report.kept],
        "unmatched_rules": list(report.unmatched),
    }


def show(console: Console, report: "Report", settings: dict[str, Any], top: int) -> None:
    """Print the tables: categories, largest sites, what was not compressed and why.

    Args:
        console: Where to; 80 columns are enough.
        report: The audit.
        settings: What it was made for.
        top: How many of the largest sites.
    """
    shown = {name: value for name, value in settings.items() if name not in ("labels", "overrides")}
    console.print(" ".join(f"{name}={value}" for name, value in shown.items()), markup=False)
    for override in settings["overrides"]:
        console.print(override, markup=False)
    totals = _table("bytes by category")
    for name, total in report.totals().items():
        last = name == "total"
        totals.add_row(name, *_sides(total), style="bold" if last else "")
    console.print(totals)
    for name, total in report.totals().items():
        if total.unknown and name != "total":
            console.print(f"{name}: unknown, left out: {total.unknown}", markup=False)
    counted = "counted (the batch has labels)" if report.loss else "not counted (no labels given)"
    console.print(f"The loss's saved tensors are {counted}. Temporaries are not counted.\n")
    sites = _table(f"the {min(top, len(report.rows))} largest sites")
    for row in report.largest(top):
        kind = f" ({row.kind})" if row.kind in ("weight", "gradient") else ""
        sites.add_row(escape(row.name + kind), *_sides(row))
    console.print(sites)
    console.print(_kept_table(report.kept))
    for rule in report.unmatched:
        console.print(f"matched nothing: {rule}", markup=False)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, expand=False)
    table.add_column("", overflow="fold", ratio=None)
    for name in ("plain", "planned", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _kept_table(kept: "Sequence[Kept]") -> Table:
    table = Table(title="\nnot compressed, and why", title_justify="left", box=None, pad_edge=False)
    table.add_column("why", overflow="fold")
    table.add_column("kind")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    for group in kept:
        why = escape(f"{group.reason}\n  e.g. {group.example}")
        table.add_row(why, group.kind, size(group.nbytes), f"{group.count:,}")
    return table


def _sides(total: "Row | Total") -> tuple[str, str, str]:
    ratio = "-" if total.ratio is None else f"{total.ratio:.3f}"
    unknown = "+ ?" if getattr(total, "unknown", "") else ""
    plain, planned = f"{size(total.plain)}{unknown}", f"{size(total.planned)}{unknown}"
    return plain, planned, ratio


def size(nbytes: int) -> str:
    """Bytes for the eye, in KiB, MiB or GiB.

    Example:
        >>> size(2**30 * 3 // 2), size(5 * 2**20), size(100)
        ('1.50 GiB', '5.00 MiB', '0.10 KiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes / 2**10:.2f} KiB"


def _help() -> str:
    from memtrain.cli.models import FAMILIES, OPTIMIZERS
    from memtrain.config import options

    def wrapped(names: Iterable[str], indent: int) -> str:
        lines = textwrap.wrap(", ".join(names), 80 - indent)
        return ("\n" + " " * indent).join(lines)

    return HELP.format(
        models=wrapped(FAMILIES, 8),
        optimizers=wrapped(OPTIMIZERS, 13),
        presets=wrapped(options("preset"), 13),
    )

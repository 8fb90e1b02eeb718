"""`memtrain-report`: where every byte of a training step would go, plain and planned."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from memtrain.audit import audit
from memtrain.cli import paper_table, report_diff, report_json, report_png
from memtrain.cli.console import consoles, drop_output, working
from memtrain.cli.files import replaced
from memtrain.cli.gradients import gradients
from memtrain.cli.models import Built, build
from memtrain.cli.report_csv import as_csv
from memtrain.cli.report_help import help_text
from memtrain.cli.report_html import as_html
from memtrain.cli.report_limits import broken
from memtrain.cli.report_request import STDOUT, files, parse, requested, settings
from memtrain.cli.report_tables import show
from memtrain.config import Config
from memtrain.report import Report
from memtrain.sizes import format_size

DONE, UNTRACEABLE, WRONG, LIMIT, INTERRUPTED = 0, 1, 2, 3, 130


class _UntraceableError(Exception):
    """The model cannot be run under fake tensors."""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point.

    Args:
        argv: Without the program's name; `sys.argv`'s by default.

    Returns:
        The exit status: 0 done, 1 the model could not be traced, 2 wrong arguments or files,
        3 a limit is broken, 130 interrupted.

    Example:
        >>> main(["model=gpt3"])
        2
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    console, errors = consoles()
    try:
        return _run(argv, console, errors)
    except BrokenPipeError:
        drop_output()
        return DONE
    except KeyboardInterrupt:
        errors.print("memtrain-report: interrupted", markup=False)
        return INTERRUPTED
    except _UntraceableError as error:
        errors.print(f"memtrain-report: {error}", markup=False)
        return UNTRACEABLE
    except (ValueError, TypeError, ImportError, OSError) as error:
        errors.print(f"memtrain-report: {error}", markup=False)
        return WRONG


def _run(argv: list[str], console: Console, errors: Console) -> int:
    if {"-h", "--help"} & set(argv) or not argv:
        console.out(help_text(), end="", highlight=False)
        return DONE
    options = parse(argv)
    if options.diff:
        return _diff(options, console, errors)
    if options.paper_table:
        return _paper_table(options, console, errors)
    return _report(options, console, errors)


def _report(options: argparse.Namespace, console: Console, errors: Console) -> int:
    request, config = requested(options.overrides)
    with working(errors, f"building {request.model} without its weights"):
        built = build(request)
    with working(errors, "tracing the step, plain and planned"):
        report = _audit(built, config, peak=options.peak)
    asked = settings(request, options.overrides, built.batch)
    with working(errors, "writing the files"):
        _write(options, report, asked)
    lines = broken(report, options.fail_over, options.fail_under)
    for line in lines:
        errors.print(f"memtrain-report: {line}", markup=False)
    status = LIMIT if lines else DONE
    try:
        if not _printed(options, report, asked, console):
            show(console, report, asked, top=options.top, by=options.by, depth=options.depth)
            if options.gradients:
                with working(errors, "measuring the gradient"):
                    quality = gradients(request, config)
                console.print(quality.table(options.top))
    except BrokenPipeError:
        drop_output()  # the limits count whether anyone reads the tables or not
    return status


def _audit(built: Built, config: Config, *, peak: bool) -> Report:
    try:
        return audit(built.model, built.optimizer, built.batch, config, peak=peak)
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else ""
        raise _UntraceableError(f"{type(error).__name__}: {why}") from error


def _write(options: argparse.Namespace, report: Report, asked: Mapping[str, Any]) -> None:
    """Write the files that are asked for."""
    for option, path in files(options):
        if option == "--png":
            with replaced(path, option) as partial:
                report_png.draw(partial, report, asked)
        elif path != STDOUT:
            write(path, option, _text(option, report, asked))


def _printed(
    options: argparse.Namespace, report: Report, asked: Mapping[str, Any], console: Console
) -> bool:
    """Print what takes the place of the tables, if anything does."""
    for option, path in files(options):
        if path == STDOUT:
            console.out(_text(option, report, asked), end="", highlight=False)
            return True
    return False


def _text(option: str, report: Report, asked: Mapping[str, Any]) -> str:
    if option == "--html":
        return as_html(report, asked)
    return as_csv(report) if option == "--csv" else report_json.as_text(report, asked)


def write(path: Path, option: str, text: str) -> None:
    """Write a file, whole or not at all.

    Args:
        path: The file; an older one is replaced.
        option: Who asks, for the message.
        text: Its content.

    Raises:
        OSError: If it cannot be written; names the path.
    """
    with replaced(path, option) as partial:
        partial.write_text(text, encoding="utf-8")


def _paper_table(options: argparse.Namespace, console: Console, errors: Console) -> int:
    if options.overrides:
        raise ValueError(f"--paper-table takes no keys; {options.overrides[0]!r} is not for it")
    rows = []
    for number, name in enumerate(paper_table.PAPER, 1):
        with working(errors, f"tracing {name} ({number} of {len(paper_table.PAPER)})"):
            rows.append((name, paper_table.measured(name)))
    console.print(paper_table.table(rows), highlight=False)
    console.out(paper_table.CONVENTION, end="", highlight=False)
    return DONE


def _diff(options: argparse.Namespace, console: Console, errors: Console) -> int:
    if options.overrides:
        raise ValueError(f"--diff compares two files; {options.overrides[0]!r} is not for it")
    change = report_diff.compare(*map(report_json.read, options.diff))
    status = DONE
    if options.fail_over is not None and change.growth > options.fail_over:
        limit = f"more than --fail-over {format_size(options.fail_over)}"
        errors.print(f"memtrain-report: grew by {format_size(change.growth)}, {limit}")
        status = LIMIT
    try:
        report_diff.show_change(console, change, options.top)
    except BrokenPipeError:
        drop_output()
    return status

"""`memtrain-report`: where every byte of a training step would go, plain and planned."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from memtrain.audit.peak import StepOptions, Timeline
from memtrain.audit.peak.predict import UnpredictableError
from memtrain.audit.report import Report
from memtrain.cli.command_line import consoles, drop_output, replaced, working
from memtrain.cli.models.build_model import Built, build, build_real
from memtrain.cli.models.request import Request
from memtrain.cli.render import charts, data_files
from memtrain.cli.render.outcome import Outcome, broken_limits
from memtrain.cli.render.page import as_html
from memtrain.cli.render.text_tables import show
from memtrain.cli.report import diff, fitting
from memtrain.cli.report.arguments import (
    STDOUT,
    files,
    help_text,
    of_device,
    parse,
    requested,
    settings,
)
from memtrain.cli.report.audits import Working, measured, only_measured, predicted, verified
from memtrain.config.sizes import format_size, parse_size
from memtrain.config.sources import Config
from memtrain.planner import DoesNotFit, write_rates

DONE, UNTRACEABLE, WRONG, LIMIT, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point.

    Args:
        argv: Without the program's name; `sys.argv`'s by default.

    Returns:
        The exit status: 0 done, 1 the model could not be traced, 2 wrong arguments or files,
        3 a limit is broken or nothing fits the budget, 130 interrupted.

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
    except UnpredictableError as error:
        errors.print(f"memtrain-report: {error}", markup=False)
        return UNTRACEABLE
    except DoesNotFit as error:
        fitting.show_misfit(errors, error)
        return LIMIT
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
    if options.measure_rates:
        return _rates(options, console, errors)
    return _report(options, console, errors)


def _report(options: argparse.Namespace, console: Console, errors: Console) -> int:
    request, config = requested(options.overrides)
    config = fitting.chosen(request, config)
    told = partial(working, errors)
    step = _step(request, options, errors)
    with told("reading the goal"):
        goal = fitting.goal(request, step)
    with told(f"building {request.model}{'' if options.measure else ' without its weights'}"):
        built = (
            build_real(request, config.seed, _place(step)) if options.measure else build(request)
        )
    with told("planning") as stage:
        planned = fitting.planned(request, config, built, goal, stage)
    config = config if planned is None else planned.plan.config
    if options.plan is not None:
        fitting.save(options.plan, built, config, step)
    timeline = None if planned is None else planned.timeline
    report = _audited(options, built, config, step, told, timeline)
    asked = settings(request, options.overrides, built[2])
    sizes, memory = {}, parse_size(request.memory or 0, "memory")
    if memory:
        sizes = fitting.largest_sizes(built, request, config, step, told)
    outcome = Outcome(report, asked, sizes, memory, planned)
    with told("writing the files"):
        _write(options, outcome)
    lines = broken_limits(report, options.fail_over, options.fail_under)
    for line in lines:
        errors.print(f"memtrain-report: {line}", markup=False)
    try:
        if not _printed(options, outcome, console):
            if planned is not None:
                fitting.show_fit(console, planned)
            show(console, outcome, top=options.top, by=options.by, depth=options.depth)
            if request.verify:
                found = verified(request, config)
                console.print(found.verdict, markup=False)
                console.print(found.table(options.top))
                lines += [] if found.ok else [found.verdict]
    except BrokenPipeError:
        drop_output()  # the limits count whether anyone reads the tables or not
    return LIMIT if lines else DONE


def _step(request: Request, options: argparse.Namespace, errors: Console) -> StepOptions:
    """The step to predict: on the device of the one to measure, where one is."""
    for name, asked in (("--measure", options.measure), ("verify=true", request.verify)):
        if asked and request.compiled:
            raise ValueError(
                f"{name} follows the ops of a step, which compiled code does not run one by one; "
                f"allowed with {name}: compile=false"
            )
    if request.verify and any(path == STDOUT for _, path in files(options)):
        raise ValueError("- takes the standard output alone: without verify=true")
    on_cuda = request.device != "cpu" and torch.cuda.is_available()
    if options.snapshot is not None and not on_cuda:
        raise ValueError("--snapshot is of the CUDA allocator; there is no CUDA device to run on")
    step = request.step
    if options.measure and request.device != "cpu" and not on_cuda:
        errors.print("memtrain-report: no CUDA device here: predicted and measured on the CPU")
        step = replace(request.step, device="cpu")
    return step


def _place(step: StepOptions) -> str:
    return "cuda" if (step.device or "").startswith("cuda") else "cpu"


def _audited(
    options: argparse.Namespace,
    built: Built,
    config: Config,
    step: StepOptions,
    told: Working,
    planned: Timeline | None,
) -> Report:
    try:
        with told("tracing the step, plain and planned"):
            report = predicted(built, config, step, peak=options.peak, planned=planned)
    except UnpredictableError as error:
        if not options.measure:
            raise
        report = only_measured(error, built, config, step, told)
        if options.snapshot is None:
            return report
    if not options.measure:
        return report
    return measured(report, built, config, step, told, options.snapshot)


def _write(options: argparse.Namespace, outcome: Outcome) -> None:
    """Write the files that are asked for."""
    for option, path in files(options):
        if path != STDOUT:
            write(path, option, _text(option, outcome))


def _printed(options: argparse.Namespace, outcome: Outcome, console: Console) -> bool:
    """Print what takes the place of the tables, if anything does."""
    for option, path in files(options):
        if path == STDOUT:
            console.out(_text(option, outcome), end="", highlight=False)
            return True
    return False


def _text(option: str, outcome: Outcome) -> str:
    if option == "--html":
        return as_html(outcome)
    if option == "--svg":
        return charts.step_svg(outcome.report, outcome.settings)
    return data_files.as_csv(outcome.report) if option == "--csv" else data_files.as_text(outcome)


def write(path: Path, option: str, text: str) -> None:
    """Write a file, whole or not at all.

    Args:
        path: The file; an older one is replaced.
        option: Who asks, for the message.
        text: Its content.

    Raises:
        OSError: If it cannot be written; names the path.
    """
    with replaced(path, option) as partly:
        partly.write_text(text, encoding="utf-8")


def _rates(options: argparse.Namespace, console: Console, errors: Console) -> int:
    request = of_device(options.overrides)
    with working(errors, "measuring this device"):
        rates = fitting.measured_rates(request)
    with replaced(options.measure_rates, "--measure-rates") as partly:
        write_rates(rates, partly)
    fitting.show_rates(console, rates)
    return DONE


def _diff(options: argparse.Namespace, console: Console, errors: Console) -> int:
    if options.overrides:
        raise ValueError(f"--diff compares two files; {options.overrides[0]!r} is not for it")
    changes = diff.compare(*map(data_files.read, options.diff))
    growth, status = changes[1][-1].growth, DONE  # of the peak; of the total without one
    if options.fail_over is not None and growth > options.fail_over:
        limit = f"more than --fail-over {format_size(options.fail_over)}"
        errors.print(f"memtrain-report: grew by {format_size(growth)}, {limit}")
        status = LIMIT
    try:
        diff.show_changes(console, changes, top=options.top, by=options.by)
    except BrokenPipeError:
        drop_output()
    return status


if __name__ == "__main__":
    sys.exit(main())

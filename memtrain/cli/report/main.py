"""`memtrain-report`: predict the bytes of a training step, without and with memtrain."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import UnpredictableError
from memtrain.audit.report import Report, audit
from memtrain.cli.command_line import consoles, discard_output, working
from memtrain.cli.models.build_model import Built, build, build_real
from memtrain.cli.models.request import Request
from memtrain.cli.render.charts import step_svg
from memtrain.cli.render.json_file import as_text
from memtrain.cli.render.report_data import ReportData, limit_error
from memtrain.cli.render.text_tables import show
from memtrain.cli.report import budget
from memtrain.cli.report.arguments import STDOUT, help_text, parse_keys, parse_options, settings
from memtrain.config.sizes import parse_size
from memtrain.config.sources import Config
from memtrain.plan.file import write_file
from memtrain.plan.plan import make_plan
from memtrain.planner import DoesNotFit
from memtrain.verification import COLUMNS, verify

Working = Callable[[str], AbstractContextManager[Any]]
DONE, UNTRACEABLE, WRONG, LIMIT, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, by default with the arguments of `sys.argv`, and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console, errors = consoles()
    try:
        if {"-h", "--help"} & set(argv) or not argv:
            console.out(help_text(), end="", highlight=False)
            return DONE
        return _report(parse_options(argv), console, errors)
    except BrokenPipeError:
        discard_output()
        return DONE
    except KeyboardInterrupt:
        errors.print("memtrain-report: interrupted", markup=False)
        return INTERRUPTED
    except UnpredictableError as error:
        errors.print(f"memtrain-report: {error}", markup=False)
        return UNTRACEABLE
    except DoesNotFit as error:
        budget.print_misfit(errors, error)
        return LIMIT
    except (ValueError, TypeError, ImportError, OSError) as error:
        errors.print(f"memtrain-report: {error}", markup=False)
        return WRONG


def _report(options: argparse.Namespace, console: Console, errors: Console) -> int:
    request, config = parse_keys(options.overrides)
    config = budget.load_config(request, config)
    progress = partial(working, errors)
    step = _step(request, options, errors)
    with progress("checking the budget"):
        goal = budget.planner_goal(request, step)
    with progress(f"building {request.model}{'' if options.measure else ' without its weights'}"):
        built = (
            build_real(request, config.seed, _device_type(step))
            if options.measure
            else build(request)
        )
    with progress("planning") as stage:
        planned = budget.plan_for_budget(request, config, built, goal, stage)
    config = config if planned is None else planned.plan.config
    if options.plan is not None:
        budget.save_plan(options.plan, built, config, step)
    report = _audit(options, built, config, step, progress)
    requested = settings(request, options.overrides, built[2])
    sizes, memory = {}, parse_size(request.memory or 0, "memory")
    if memory:
        sizes = budget.largest_sizes(built, request, config, step, progress)
    data = ReportData(report, requested, sizes, memory, planned)
    if options.json not in (None, STDOUT):
        write_file(options.json, as_text(data))
    if options.svg is not None:
        write_file(options.svg, step_svg(data.report, data.settings))
    over_limit = limit_error(report, options.fail_over)
    if over_limit:
        errors.print(f"memtrain-report: {over_limit}", markup=False)
    status = LIMIT if over_limit else DONE
    try:
        if options.json == STDOUT:
            console.out(as_text(data), end="", highlight=False)
            return status
        show(console, data, top=options.top, by=options.by)
        if request.verify:
            model, _, batch = build_real(request, config.seed)
            found = verify(model, batch, config, per_site=True, warn=False, progress=True)
            console.print(found.verdict, markup=False)
            console.print(found.table(options.top))
            console.print(COLUMNS)
            status = status if found.ok else LIMIT
    except BrokenPipeError:
        discard_output()  # the status does not depend on the reader
    return status


def _step(request: Request, options: argparse.Namespace, errors: Console) -> StepOptions:
    """Return the options of the predicted step, on the device of the measured one if any."""
    for name, requested in (("--measure", options.measure), ("verify=true", request.verify)):
        if requested and request.compiled:
            raise ValueError(
                f"{name} follows the ops of a step, which compiled code does not run one by one; "
                f"allowed with {name}: compile=false"
            )
    if request.verify and options.json == STDOUT:
        raise ValueError("- takes the standard output alone: without verify=true")
    on_cuda = request.device != "cpu" and torch.cuda.is_available()
    step = request.step
    if options.measure and request.device != "cpu" and not on_cuda:
        errors.print("memtrain-report: no CUDA device here: predicted and measured on the CPU")
        step = replace(request.step, device="cpu")
    return step


def _device_type(step: StepOptions) -> str:
    return "cuda" if (step.device or "").startswith("cuda") else "cpu"


def _audit(
    options: argparse.Namespace, built: Built, config: Config, step: StepOptions, working: Working
) -> Report:
    model, optimizer, batch = built
    make_plan(model, optimizer, config)  # an error in a plan is not the model's
    try:
        with working("tracing the step, without and with the plan"):
            return audit(
                model,
                batch,
                config,
                optimizer=optimizer,
                peak=options.peak,
                measure=options.measure,
                options=step,
            )
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        raise UnpredictableError(budget.one_line(error)) from error


if __name__ == "__main__":
    sys.exit(main())

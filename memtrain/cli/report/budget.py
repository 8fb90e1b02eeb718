"""`memtrain-report budget=24GiB`: the plan whose peak fits, and plans as files."""

from pathlib import Path

import torch
from rich.console import Console

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import UnpredictableError, conditions
from memtrain.cli.models.models import Built
from memtrain.cli.report.audits import UntraceableError, explained
from memtrain.cli.report.request_fields import DTYPES, Request
from memtrain.config.sources import Config
from memtrain.plan.file import load
from memtrain.plan.plan import make_plan
from memtrain.planner import DoesNotFit, Fit, Goal, Rates, fit, measure_rates, read_rates


def chosen(request: Request, config: Config) -> Config:
    """The config of the plan file that is asked for, or the one of the other keys.

    Args:
        request: Its `plan` names the file.
        config: Of memtrain's keys.

    Returns:
        The config to report on.

    Raises:
        ValueError: For a file that does not exist or is no YAML, with its line if it is corrupt.
    """
    if request.plan is None:
        return config
    if not request.plan.endswith((".yaml", ".yml")) or not Path(request.plan).is_file():
        raise ValueError(f"plan={request.plan!r} is no file; allowed: a .yaml file")
    return load(request.plan)


def goal(request: Request, step: StepOptions) -> Goal | None:
    """What a plan is asked for, checked before a model is built.

    Args:
        request: Its `budget`, `allow`, `max_error`, `objective` and `rates`.
        step: The step whose peak must fit.

    Returns:
        The goal; None without a budget.

    Raises:
        ValueError: For values that are not allowed.
        FileNotFoundError: If there is no such file of rates.
    """
    if request.budget is None:
        return None
    return Goal(
        allow=[name.strip() for name in request.allow.split(",") if name.strip()],
        max_error=request.max_error,
        objective=request.objective,  # type: ignore[arg-type]
        rates=rates_of(request),
        options=step,
    )


def planned(request: Request, config: Config, built: Built, goal: Goal | None) -> Fit | None:
    """The plan that fits the budget, if there is one to fit.

    Args:
        request: Its `budget`.
        config: Whose exceptions and options hold.
        built: Model, optimizer and batch.
        goal: What is asked of the plan.

    Returns:
        What the planner found; None without a goal.

    Raises:
        DoesNotFit: If nothing fits.
        ValueError: For values that are not allowed.
        UntraceableError: If the model cannot run without data.
    """
    if goal is None or request.budget is None:
        return None
    try:
        return fit(built.model, built.optimizer, built.batch, request.budget, config, goal=goal)
    except UnpredictableError as error:
        raise UntraceableError(explained(error)) from error
    except (ValueError, TypeError):
        raise
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        raise UntraceableError(explained(error)) from error


def rates_of(request: Request) -> Rates:
    """The throughputs that step times are told by.

    Args:
        request: Its `rates`: none (byte counts), a file, or `measure`.

    Returns:
        The rates.

    Raises:
        ValueError: If the CUDA device to measure is not here, or for a file that holds no rates.
        FileNotFoundError: If there is no such file.
    """
    if request.rates is None:
        return Rates()
    return measured_rates(request) if request.rates == "measure" else read_rates(request.rates)


def measured_rates(request: Request) -> Rates:
    """Measure this device.

    Args:
        request: Its `device`; its `autocast` or `dtype` is that of the arithmetic.

    Returns:
        Its rates.

    Raises:
        ValueError: If there is no CUDA device and one is asked for.
    """
    device = "cpu" if request.device == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to measure; device=cpu measures this CPU")
    return measure_rates(device, dtype=DTYPES[request.autocast or request.dtype])


def save(path: Path, built: Built, config: Config, step: StepOptions) -> None:
    """Write the plan that a config makes of a model and a batch for a step's device."""
    with conditions(built.model, step):
        plan = make_plan(built.model, built.optimizer, config, batch=built.batch)
    plan.save(path)


def show_fit(console: Console, found: Fit) -> None:
    """Print what the planner found, in 80 columns."""
    for line in found.lines():
        console.print(line, markup=False, highlight=False)
    console.print()


def show_rates(console: Console, rates: Rates) -> None:
    """Print what was measured."""
    console.print(f"{rates.name}:", markup=False, highlight=False)
    for what, rate, unit in (
        ("copying", rates.copy, "GB/s, read plus written"),
        ("matrix products", rates.flops, "GFLOP/s"),
        ("group codes", rates.pack, "GB/s, read plus written"),
    ):
        console.print(f"  {what:16}{rate / 1e9:,.1f} {unit}", markup=False, highlight=False)
    for what, seconds in (("any op", rates.launch), ("a group code", rates.call)):
        console.print(f"  {what:16}{seconds * 1e6:.1f} us besides", markup=False, highlight=False)


def show_misfit(errors: Console, error: DoesNotFit) -> None:
    """Print why nothing fits, and what would help."""
    for line in (*error.lines(), "without budget= the report shows where every byte goes"):
        errors.print(f"memtrain-report: {line}", markup=False)

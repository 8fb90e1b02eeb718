"""`memtrain-report budget=24GiB`: the plan whose peak fits, and plans as files."""

import textwrap
from pathlib import Path

from rich.console import Console

from memtrain.cli.models import Built
from memtrain.cli.report_audit import UntraceableError, explained
from memtrain.cli.request import Request
from memtrain.config import Config
from memtrain.peak import StepOptions
from memtrain.plan import make_plan
from memtrain.planfile import load
from memtrain.planner import DoesNotFit, Fit, Goal, Rates, fit, read_rates


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


def planned(request: Request, config: Config, built: Built, step: StepOptions) -> Fit | None:
    """The plan that fits the budget, if there is one to fit.

    Args:
        request: Its `budget`, `allow`, `max_error`, `objective` and `rates`.
        config: Whose exceptions and options hold.
        built: Model, optimizer and batch.
        step: The step whose peak must fit.

    Returns:
        What the planner found; None without a budget.

    Raises:
        DoesNotFit: If nothing fits.
        ValueError: For values that are not allowed.
        UntraceableError: If the model cannot run without data.
    """
    if request.budget is None:
        return None
    goal = Goal(
        allow=[name.strip() for name in request.allow.split(",") if name.strip()],
        max_error=request.max_error,
        objective=request.objective,  # type: ignore[arg-type]
        rates=Rates() if request.rates is None else read_rates(request.rates),
        options=step,
    )
    try:
        return fit(built.model, built.optimizer, built.batch, request.budget, config, goal=goal)
    except (ValueError, TypeError):
        raise
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        raise UntraceableError(explained(error)) from error


def save(path: Path, built: Built, config: Config) -> None:
    """Write the plan that a config makes of a model and a batch."""
    make_plan(built.model, built.optimizer, config, batch=built.batch).save(path)


def show_fit(console: Console, found: Fit) -> None:
    """Print what the planner found, in 80 columns."""
    for line in found.lines():
        head, rest = line[:14], line[14:]
        lines = textwrap.wrap(rest, 66) or [""]
        console.print(f"{head}{lines[0]}", markup=False, highlight=False)
        for more in lines[1:]:
            console.print(f"{'':14}{more}", markup=False, highlight=False)
    console.print()


def show_misfit(errors: Console, error: DoesNotFit) -> None:
    """Print why nothing fits, and what would help."""
    for line in error.lines():
        errors.print(f"memtrain-report: {line}", markup=False)

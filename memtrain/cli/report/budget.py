"""Plans that fit `budget=`, sizes that fit `memory=`, and plan files."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.largest import largest
from memtrain.audit.peak.predict import UnpredictableError, conditions
from memtrain.cli.models.build_model import Built
from memtrain.cli.models.named_models import NAMED_MODELS
from memtrain.cli.models.request import Request
from memtrain.config.sizes import parse_size
from memtrain.config.sources import Config, load
from memtrain.plan.plan import make_plan
from memtrain.planner import DoesNotFit, Fit, Goal, fit
from memtrain.planner.goal import Progress, silent

_MOST = 2**20


def load_config(request: Request, config: Config) -> Config:
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


def planner_goal(request: Request, step: StepOptions) -> Goal | None:
    """The planner's goal, checked before a model is built.

    Args:
        request: Its `budget`, `allow`, `max_error` and `objective`.
        step: The step whose peak must fit.

    Returns:
        The goal; None without a budget.

    Raises:
        ValueError: For values that are not allowed.
    """
    if request.budget is None:
        return None
    return Goal(
        allow=[name.strip() for name in request.allow.split(",") if name.strip()],
        max_error=request.max_error,
        objective=request.objective,  # type: ignore[arg-type]
        options=step,
    )


def plan_for_budget(
    request: Request, config: Config, built: Built, goal: Goal | None, progress: Progress = silent
) -> Fit | None:
    """The plan that fits the budget, if there is one to fit.

    Args:
        request: Its `budget`.
        config: Whose exceptions and options hold.
        built: Model, optimizer and batch.
        goal: What is asked of the plan.
        progress: Called with each stage.

    Returns:
        What the planner found; None without a goal.

    Raises:
        DoesNotFit: If nothing fits.
        ValueError: For values that are not allowed.
        UnpredictableError: If the model cannot run without data.
    """
    if goal is None or request.budget is None:
        return None
    try:
        return fit(*built, request.budget, config, goal=goal, progress=progress)
    except (ValueError, TypeError):
        raise
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        raise UnpredictableError(one_line(error)) from error


def one_line(error: Exception) -> str:
    """Explain an error of a model under fake tensors, in a line.

    Example:
        >>> one_line(RuntimeError("shapes differ")), one_line(ValueError("no weights"))
        ('RuntimeError: shapes differ', 'no weights')
    """
    first = (str(error).strip().splitlines() or ["(no message)"])[0]
    return (
        first if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {first}"
    )


def largest_sizes(
    built: Built,
    request: Request,
    config: Config,
    options: StepOptions,
    working: Callable[[str], AbstractContextManager[Any]],
) -> dict[str, dict[str, int]]:
    """Search the largest batch, and for text the longest sequence, whose predicted peak fits.

    Args:
        built: Model, optimizer and a batch.
        request: Its `memory`.
        config: The plan.
        options: Of the step.
        working: Called with each stage.

    Returns:
        `ReportData.sizes`.

    Raises:
        ValueError: For a batch of unknown size.
    """
    memory = parse_size(request.memory or 0, "memory")
    model, _, batch = built
    sizes = {"batch": {"limit": _MOST}}
    if isinstance(batch, dict) and "input_ids" in batch:
        known = NAMED_MODELS.get(request.model)
        own = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        sizes["seq"] = {"limit": (known.longest if known else own) or _MOST}
    words = {"batch": "largest batch", "seq": "longest sequence"}
    for what, found in sizes.items():
        for side, cfg in (("plain", None), ("planned", config)):
            with working(f"searching the {words[what]} that fits, {side}"):
                most = found["limit"]
                sized = largest(*built, cfg, memory=memory, what=what, most=most, options=options)
            found[side] = sized.size
    return sizes


def save_plan(path: Path, built: Built, config: Config, step: StepOptions) -> None:
    """Write the plan that a config makes of a model and a batch for a step's device."""
    model, optimizer, batch = built
    with conditions(model, step):
        plan = make_plan(model, optimizer, config, batch=batch)
    plan.save(path)


def print_misfit(errors: Console, error: DoesNotFit) -> None:
    """Print why nothing fits, and what would help."""
    for line in (*error.lines(), "without budget= the report shows where every byte goes"):
        errors.print(f"memtrain-report: {line}", markup=False)

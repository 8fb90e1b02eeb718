"""Plans for `budget=`, sizes for `memory=`, and plan files."""

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
from memtrain.cli.render.report_data import LABELS
from memtrain.config.sizes import parse_size
from memtrain.config.sources import Config, load
from memtrain.plan.plan import make_plan
from memtrain.planner import DoesNotFit, Fit, Goal, fit
from memtrain.planner.goal import Progress, silent

_MOST = 2**20


def load_config(request: Request, config: Config) -> Config:
    """Return the config of the file in `plan=`, or `config` without `plan=`."""
    if request.plan is None:
        return config
    if not request.plan.endswith((".yaml", ".yml")) or not Path(request.plan).is_file():
        raise ValueError(f"plan={request.plan!r} is no file; allowed: a .yaml file")
    return load(request.plan)


def planner_goal(request: Request, step: StepOptions) -> Goal | None:
    """Return the planner's goal for a step, or None without `budget=`."""
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
    """Return the planner's result, or None without a goal."""
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
    """Return an error of a model under fake tensors as one line.

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
    """Return `ReportData.sizes`: the largest batch, and for text the longest sequence, that fit."""
    memory = parse_size(request.memory or 0, "memory")
    model, optimizer, batch = built
    sizes = {"batch": {"limit": _MOST}}
    if isinstance(batch, dict) and "input_ids" in batch:
        known = NAMED_MODELS.get(request.model)
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        sizes["seq"] = {"limit": (known.longest if known else positions) or _MOST}
    words = {"batch": "largest batch", "seq": "longest sequence"}
    for what, found in sizes.items():
        for side, cfg in (("plain", None), ("planned", config)):
            with working(f"searching the {words[what]} that fits, {LABELS[side]}"):
                step = {"optimizer": optimizer, "options": options, "most": found["limit"]}
                found[side] = largest(model, batch, cfg, memory, what=what, **step).size
    return sizes


def save_plan(path: Path, built: Built, config: Config, step: StepOptions) -> None:
    """Write the plan of a config for a model and a batch."""
    model, optimizer, batch = built
    with conditions(model, step):
        plan = make_plan(model, optimizer, config, batch=batch)
    plan.save(path)


def print_misfit(errors: Console, error: DoesNotFit) -> None:
    """Print why no plan fits, and possible fixes."""
    for line in (*error.lines(), "without budget=, the report shows where every byte goes"):
        errors.print(f"memtrain-report: {line}", markup=False)

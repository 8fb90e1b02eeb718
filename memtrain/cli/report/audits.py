"""What `memtrain-report` knows about a model: predicted, and measured where that is asked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure
from memtrain.audit.report import CATEGORIES, Report, audit
from memtrain.cli.models.models import Built
from memtrain.config.sources import Config
from memtrain.plan.plan import make_plan

Working = Callable[[str], AbstractContextManager[None]]


class UntraceableError(Exception):
    """The model cannot be run under fake tensors."""


def predicted(built: Built, config: Config, step: StepOptions, *, peak: bool) -> Report:
    """The audit of a model under a plan.

    Args:
        built: Model, optimizer and batch, fake or real.
        config: The plan.
        step: What the step behind the timelines is.
        peak: Whether there shall be timelines.

    Returns:
        The report.

    Raises:
        ValueError: For a plan of another model: names the sites that do not exist.
        UntraceableError: If the model cannot run without data; says why in a line.
    """
    make_plan(built.model, built.optimizer, config)  # what is wrong in a plan is not the model's
    try:
        return audit(*built, config, peak=peak, options=step)
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        raise UntraceableError(explained(error)) from error


def explained(error: Exception) -> str:
    """What went wrong with a model under fake tensors, in a line.

    Example:
        >>> explained(RuntimeError("shapes differ")), explained(ValueError("no weights"))
        ('RuntimeError: shapes differ', 'no weights')
    """
    first = (str(error).strip().splitlines() or ["(no message)"])[0]
    return (
        first if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {first}"
    )


def only_measured(
    error: UntraceableError, built: Built, config: Config, step: StepOptions, working: Working
) -> Report:
    """The audit of a model that fake tensors cannot run, from real steps.

    Args:
        error: Why they cannot.
        built: Real.
        config: The plan.
        step: What the step is.
        working: Is told what goes on.

    Returns:
        Weights, gradients and states row by row, and timelines; saved activations are unknown. What
        else than its data keeps a model from fake tensors leaves the timelines only.

    Memory:
        That of the steps.
    """
    try:
        with working("running real steps, plain and planned"):
            return audit(*built, config, peak=True, measure=True, options=step)
    except Exception:  # noqa: BLE001 (what a model raises under fake tensors is told already)
        unknown = dict.fromkeys(CATEGORIES, str(error))
        nothing = Report(rows=(), kept=(), unmatched=(), loss=False, unknown=unknown)
        return measured(nothing, built, config, step, working)


def measured(
    report: Report,
    built: Built,
    config: Config,
    step: StepOptions,
    working: Working,
    snapshot: Path | None = None,
) -> Report:
    """The report with the timelines of real steps, plain and planned.

    Args:
        report: Predicted.
        built: Real.
        config: The plan.
        step: What the step is.
        working: Is told what goes on.
        snapshot: A file for torch's snapshot of the CUDA allocator in the planned step.

    Returns:
        The report, with what was measured.

    Memory:
        That of the steps.
    """
    with working("running a real step, plain"):
        plain = measure(*built, None, step)
    with working("running a real step, planned"):
        planned = measure(*built, config, step, snapshot)
    return replace(report, measured=plain, planned_measured=planned)

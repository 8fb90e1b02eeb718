"""Audits of `memtrain-report`: predicted, and measured where that is asked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtrain.audit.peak import StepOptions, Timeline
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import UnpredictableError, predict
from memtrain.audit.report import CATEGORIES, Report, audit
from memtrain.cli.models.build_model import Built, build_real
from memtrain.cli.models.request import Request
from memtrain.config.sources import Config
from memtrain.plan.plan import make_plan
from memtrain.verification import Verification, verify

Working = Callable[[str], AbstractContextManager[Any]]


def predicted(
    built: Built,
    config: Config,
    step: StepOptions,
    *,
    peak: bool,
    planned: Timeline | None = None,
) -> Report:
    """The audit of a model under a plan.

    Args:
        built: Model, optimizer and batch, fake or real.
        config: The plan.
        step: What the step behind the timelines is.
        peak: Whether there shall be timelines.
        planned: The step under the plan, where it has been predicted.

    Returns:
        The report.

    Raises:
        ValueError: For a plan of another model: names the sites that do not exist.
        UnpredictableError: If the model cannot run without data; says why in a line.
    """
    make_plan(*built[:2], config)  # what is wrong in a plan is not the model's
    try:
        report = audit(*built, config, peak=peak and planned is None, options=step)
        if not peak or planned is None:
            return report
        plain = predict(*built, None, step)
        return replace(report, timeline=plain, planned_timeline=planned)
    # A user's model may raise anything under fake tensors: one line, not a traceback.
    except Exception as error:
        raise UnpredictableError(explained(error)) from error


def explained(error: Exception) -> str:
    """Explain an error of a model under fake tensors, in a line.

    Example:
        >>> explained(RuntimeError("shapes differ")), explained(ValueError("no weights"))
        ('RuntimeError: shapes differ', 'no weights')
    """
    first = (str(error).strip().splitlines() or ["(no message)"])[0]
    return (
        first if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {first}"
    )


def only_measured(
    error: UnpredictableError, built: Built, config: Config, step: StepOptions, working: Working
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


def verified(request: Request, config: Config) -> Verification:
    """Build the model with initial weights, and compare a step on random data with the exact one.

    A `py:` builder's own weights and batch are used as they are.

    Args:
        request: The model and its batch.
        config: The plan.

    Returns:
        The verdict, and the quality of each site's gradient.

    Memory:
        A plain training step's, and five gradients.
    """
    model, _, batch = build_real(request, config.seed)
    return verify(model, batch, config, per_site=True, warn=False, progress=True)

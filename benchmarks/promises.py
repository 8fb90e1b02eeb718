"""Plans at nine, six and four tenths of plain PyTorch's peak, run under a tracker of allocations.

    python -m benchmarks.tracker -m benchmarks run promises [--missing] [--set models=pointnet]

Each small model takes AdamW steps on one CPU thread under the plan that `memtrain.planner.fit`
finds with all that may be allowed. A row says what the plan promises, and what was allocated at
most in the third step: every byte that the process asked of malloc (`benchmarks.tracker`) in blocks
of a KiB or more, and beside it what smaller objects took.
"""

from functools import partial

import torch

from benchmarks.harness import Benchmark, Job, Options, Row
from benchmarks.other_models import MODELS
from benchmarks.peaks_everywhere import measure
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.planner import ALLOWED, DoesNotFit, Goal, fit

NAMES = ("pointnet", "nn_encoder", "autoencoder", "nn_transformer", "lstm")
SHARES = (0.9, 0.6, 0.4)
"""Of the predicted peak of plain PyTorch."""


def keep_promise(name: str, share: float) -> Row:
    """One row: the budget, the plan's promise, and what a real step took."""
    torch.manual_seed(0)
    case = MODELS[name]()
    optimizer = torch.optim.AdamW(case.model.parameters())
    options = StepOptions(loss=case.loss)
    plain = predict(case.model, optimizer, case.batch, None, options).peak.nbytes
    budget = int(share * plain)
    row: Row = {"model": name, "share": share, "plain_nbytes": plain, "budget_nbytes": budget}
    try:
        goal = Goal(allow=ALLOWED, sensitivity="analytic", options=options)
        found = fit(case.model, optimizer, case.batch, budget, goal=goal)
    except DoesNotFit as error:
        return {**row, "refused": f"smallest peak {error.smallest.nbytes}"}
    everything, measured = measure(case, optimizer, found.plan.config, options)
    return {
        **row,
        "refused": "",
        "promised_nbytes": found.peak.nbytes,
        "measured_nbytes": measured,
        "objects_nbytes": everything - measured,
        "measured_over_promised": measured / found.peak.nbytes,
        "holds": measured <= budget,
    }


def _jobs(options: Options) -> list[Job]:
    chosen = options.settings(models=",".join(NAMES[:1] if options.quick else NAMES))
    return [
        Job(
            f"{name} at {share} of plain's peak",
            partial(_rows, name, share),
            {"model": name, "share": share},
        )
        for name in chosen["models"].split(",")
        for share in (SHARES[1:2] if options.quick else SHARES)
    ]


def _rows(name: str, share: float) -> list[Row]:
    return [keep_promise(name, share)]


BENCHMARK = Benchmark(
    "promises",
    "a plan's promised peak beside every byte that a process allocates in a step under it",
    _jobs,
    ("model", "share", "budget_nbytes", "measured_nbytes", "measured_over_promised", "holds"),
)

"""Predicted against measured peak of a training step, for models of others, by a tracker.

    python -m benchmarks.tracker -m benchmarks run peaks_everywhere [--set models=lstm]

Small models of transformers and torch.nn take AdamW steps on one CPU thread, plain and under five
presets. A row says what `audit.peak` predicts without running the model, and what was allocated at
most in the third real step: every block of a KiB or more that the process asked of malloc
(`benchmarks.tracker`), kernels' own temporaries and libraries' workspaces among them. Smaller
blocks are reported separately: they are the objects of Python and of autograd's graph.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memtrain
from benchmarks import tracker
from benchmarks.families import FAMILIES, Case
from benchmarks.harness import Benchmark, Job, Options, Row
from benchmarks.other_models import MODELS as OTHERS
from benchmarks.other_models import Other
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors, weight_tensors
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.audit.peak.training_step import run_step

PLAIN = "plain"
PRESETS = (PLAIN, "balanced", "smallest", "exact", "optimizer_only", "all_four")
CLOSE, SMALL = 0.03, 2 * 2**20
"""A prediction holds within 3%, or 2 MiB if that is more."""


def _family(make: Callable[[], Case]) -> Other:
    """A member of a family of `benchmarks.families`."""
    case = make()
    if isinstance(case.batch, dict):
        return Other(case.model, case.batch)
    pixels, labels = case.batch
    return Other(case.model, pixels, lambda output: F.cross_entropy(output, labels))


MODELS: dict[str, Callable[[], Other]] = {
    **OTHERS,
    **{name: partial(_family, make) for name, make in FAMILIES.items()},
}
"""Name -> makes a model, its batch and its loss."""


def compare(name: str, preset: str) -> Row:
    """One row: a model under a preset; predicted beside measured."""
    torch.manual_seed(0)
    case = MODELS[name]()
    optimizer = torch.optim.AdamW(case.model.parameters())
    cfg = None if preset == PLAIN else preset
    options = StepOptions(loss=case.loss)
    row: Row = {"model": name, "preset": preset, "refused": ""}
    try:
        predicted = predict(case.model, optimizer, case.batch, cfg, options)
        everything, measured = measure(case, optimizer, cfg, options)
    except (RuntimeError, ValueError) as error:
        return {**row, "refused": str(error).partition("\n")[0][:120]}
    nbytes = predicted.peak.nbytes
    return {
        **row,
        "predicted_nbytes": nbytes,
        "measured_nbytes": measured,
        "objects_nbytes": everything - measured,
        "predicted_over_measured": nbytes / measured,
        "holds": abs(nbytes - measured) <= max(CLOSE * measured, SMALL),
        "predicted_at": predicted.peak.label,
    }


def measure(case: Other, optimizer: Any, cfg: Any, options: StepOptions) -> tuple[int, int]:
    """The peak of the third of three steps: tensors alive before it, and what it allocates.

    The first two leave the optimizer's states, and what libraries make once and keep. Returns the
    bytes of all blocks, and of those of a KiB or more.
    """
    model: nn.Module = case.model
    if cfg is not None:
        model, optimizer = memtrain.wrap(model, optimizer, cfg)
    for _ in range(2):
        run_step(model, optimizer, case.batch, options)
    optimizer.zero_grad(set_to_none=True)
    given = [leaf for leaf in tree_leaves(case.batch) if isinstance(leaf, Tensor)]
    alive = storage_nbytes([*weight_tensors(model), *state_tensors(optimizer), *given])
    gc.collect()  # what is left of jobs before would otherwise be freed within the step
    peaks = tracker.peaks_of(lambda: run_step(model, optimizer, case.batch, options))
    return alive + peaks[0], alive + peaks[1]


def _jobs(options: Options) -> list[Job]:
    chosen = {"models": ",".join(MODELS), "presets": ",".join(PRESETS)}
    if options.quick:
        chosen = {"models": "pointnet", "presets": "balanced"}
    chosen = options.settings(**chosen)
    return [
        Job(f"{name}, {preset}", lambda one=name, under=preset: [compare(one, under)])
        for name in chosen["models"].split(",")
        for preset in chosen["presets"].split(",")
    ]


BENCHMARK = Benchmark(
    "peaks_everywhere",
    "the predicted peak of a training step beside every byte that a process allocates in one",
    _jobs,
    ("model", "preset", "measured_nbytes", "predicted_over_measured", "holds", "predicted_at"),
)

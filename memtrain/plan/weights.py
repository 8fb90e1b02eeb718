"""The planned bytes of weights and gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memtrain.compressors import Compressor, Keep
from memtrain.compressors.base import GRADIENT_SUM
from memtrain.compressors.registry import check_seat
from memtrain.optim.states.shards import local
from memtrain.optim.wrappers.accumulate import sum_bytes
from memtrain.optim.wrappers.apply import KEEP, RELEASE
from memtrain.optim.wrappers.weights import keeps_float32, parse
from memtrain.plan.build import build
from memtrain.plan.entry import Entry

NOT_REQUESTED = "not requested"
NOT_HELD = "not the optimizer's: no correction"
WORKSPACE = "(the largest gradient, while it is applied)"
BUCKETS = "(buckets of DistributedDataParallel)"
IN_BUCKETS = "kept: its bucket holds it until step()"


def predict_weights(model: nn.Module, optimizer: Optimizer, config: Any) -> list[Entry]:
    """One entry per parameter: its bytes now, and as `config.weights` keeps it.

    Args:
        model: Real or fake.
        optimizer: Its optimizer.
        config: `weights` is read.

    Returns:
        Entries of kind `weight`, corrections among the planned bytes; of sharded parameters this
        process's part, here and in `predict_gradients`.
    """
    dtypes, held = training_dtypes(model, config), _held(optimizer)
    kept = keeps_float32(model)
    entries = []
    for name, p in model.named_parameters():
        if config.weights == KEEP:
            entries.append(
                Entry(name, "weight", local(p).nbytes, local(p).nbytes, reason=NOT_REQUESTED)
            )
        elif p not in dtypes:
            why = kept.get(p, f"kept: {p.dtype}")
            entries.append(Entry(name, "weight", local(p).nbytes, local(p).nbytes, reason=why))
        else:
            size = parse(config.weights).nbytes if p in held else dtypes[p].itemsize
            why = "" if p in held else NOT_HELD
            planned = local(p).numel() * size
            entries.append(Entry(name, "weight", local(p).nbytes, planned, config.weights, why))
    return entries


def predict_gradients(model: nn.Module, optimizer: Optimizer, config: Any) -> list[Entry]:
    """One entry per trained parameter, and the workspace of released ones.

    Args:
        model: Real or fake.
        optimizer: Its optimizer.
        config: `weights` (a gradient has its weight's dtype), `gradients`,
            `release.accumulate` and `release.sums` are read.

    Returns:
        Entries of kind `gradient`. Of a DistributedDataParallel gradients stay, in buckets that are
        listed where they are a second copy (`gradient_as_bucket_view=False`); one that is put
        around the model later is not known here.
    """
    dtypes, held = training_dtypes(model, config), _held(optimizer)
    parallel = isinstance(model, DistributedDataParallel)
    sums = sum_compressor(config)
    entries, largest = [], 0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        planned = local(p).numel() * dtypes.get(p, p.dtype).itemsize
        if config.gradients == RELEASE and p in held and parallel:
            entries.append(Entry(name, "gradient", local(p).nbytes, planned, reason=IN_BUCKETS))
        elif config.gradients == RELEASE and p in held:
            largest = max(largest, planned)
            entries.append(_released(name, p, config.release.accumulate, sums))
        elif planned < local(p).nbytes:
            why = "in its weight's dtype"
            entries.append(Entry(name, "gradient", local(p).nbytes, planned, config.weights, why))
        else:
            entries.append(Entry(name, "gradient", local(p).nbytes, planned, reason=NOT_REQUESTED))
    if largest:
        entries.append(Entry(WORKSPACE, "gradient", 0, largest, RELEASE, "workspace"))
    if parallel and not model.gradient_as_bucket_view:
        total = sum(local(p).nbytes for p in model.parameters() if p.requires_grad)
        why = "a second copy: gradient_as_bucket_view=True spares it"
        entries.append(Entry(BUCKETS, "gradient", total, total, reason=why))
    return entries


def sum_compressor(config: Any) -> Compressor:
    """The compressor of gradients that wait for the last of several backward passes.

    Raises:
        ValueError: For one that cannot hold them: `release.sums` is named.
    """
    asked = config.release.sums
    built = build(asked)
    if isinstance(built, Keep):
        raise ValueError(f"release.sums={asked!r}; allowed: a compressor, such as identity")
    check_seat(built, GRADIENT_SUM, f"release.sums={asked!r}")
    return built


def _released(name: str, param: Tensor, passes: int, sums: Compressor) -> Entry:
    if passes == 1:
        return Entry(name, "gradient", local(param).nbytes, 0, RELEASE)
    why = f"the sum of up to {passes - 1} backward passes"
    return Entry(name, "gradient", local(param).nbytes, sum_bytes(param, sums), repr(sums), why)


def training_dtypes(model: nn.Module, config: Any) -> dict[Tensor, torch.dtype]:
    """Parameters that are kept in two bytes, with their dtype in the forward.

    Example:
        >>> from memtrain.config.sources import Config
        >>> [*training_dtypes(nn.Linear(1, 1), Config(weights="bf16+8")).values()]
        [torch.bfloat16, torch.bfloat16]
    """
    if config.weights == KEEP:
        return {}
    low, kept = parse(config.weights).dtype, keeps_float32(model)
    fits = (torch.float32, low)
    return {p: low for p in model.parameters() if p not in kept and p.dtype in fits}


def _held(optimizer: Optimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}

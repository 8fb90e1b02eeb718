"""The peak of a training step, measured on a real one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.compiled_parts import compiled_parts
from memtrain.activations.trace.fake_copies import copy_optimizer
from memtrain.api import unwrap, wrap
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import weight_tensors
from memtrain.audit.peak import cuda
from memtrain.audit.peak.held_inside import held_inside, held_on_cuda
from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.audit.peak.timeline import Timeline, replay
from memtrain.audit.peak.training_step import StepOptions, check, record_step, run_step
from memtrain.audit.process_memory import resident_nbytes, restart_resident_peak
from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.optim.states.first_step import inner_optimizer


def measure(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    cfg: Any = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
    snapshot: Path | None = None,
) -> Timeline:
    """Run two training steps and tell what was alive at each moment of the second.

    Live storages are followed from op to op, as `predict` does; what an op allocates inside itself
    and frees before it returns is what its code declares (`held_inside`). On CUDA it is not
    followed, but the step is run once more for the allocator's own peak, which sees it. Then
    weights, buffers, gradients and torch's random state are put back as they were; the optimizer
    steps as a copy.

    Args:
        model: Real; not wrapped.
        optimizer: Its optimizer; all its parameters must be the model's.
        batch: What the model is called with, on its device.
        cfg: Anything that `memtrain.wrap` takes; None for plain PyTorch.
        options: Autocast, and the loss; the device is the model's.
        snapshot: A file for torch's snapshot of the CUDA allocator (docs.pytorch.org/memory_viz
            shows it).

    Returns:
        One moment for each op.

    Raises:
        ValueError: If the model is fake or compiled, or for a config that is not valid.
        TypeError: If the batch holds no tensor.

    Memory:
        That of the steps, and a copy of weights and buffers in host memory.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> measure(model, optimizer, torch.ones(32, 64), "balanced").peak.label
        'backward of 0 / addmm'
    """
    check(model, batch)
    optimizer = inner_optimizer(optimizer)
    plain, compiled = compiled_parts(model)
    if compiled:
        raise ValueError(
            f"{type(plain).__name__} is compiled: a real step's ops are followed one by one, which "
            "compiled code does not run; allowed: the model before torch.compile, or a prediction"
        )
    if any(isinstance(x, FakeTensor) or x.is_meta for x in weight_tensors(model)):
        raise ValueError(f"{type(model).__name__} has no data: only a real model can be measured")
    on_cuda = next(model.parameters()).is_cuda
    before = torch.cuda.memory_allocated() if on_cuda else 0
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_cuda]
    own = storage_nbytes([*(x for x in weight_tensors(model) if x.is_cuda), *given])
    with _put_back(model):
        optimizer = copy_optimizer(optimizer, {id(p): p for p in model.parameters()})
        if cfg is not None:
            model, optimizer = wrap(model, optimizer, cfg)
        try:
            step = partial(run_step, model, optimizer, batch, options)
            step()
            peak = _allocated(step, snapshot) if on_cuda else 0
            inside = held_on_cuda if on_cuda else held_inside
            recorder = StorageRecorder(model, inside=inside, apart=on_cuda)
            watched = not on_cuda and restart_resident_peak()
            record_step(model, optimizer, batch, options, recorder)
            resident = resident_nbytes(peak=True) if watched else None
        finally:
            if cfg is not None:
                unwrap(model, optimizer)
    timeline = replay(recorder.events, recorder.categories, unit=cuda.UNIT if on_cuda else 1)
    if on_cuda:
        return replace(timeline, allocated=peak - before + own)
    return replace(timeline, resident=resident)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Leave weights, buffers, gradients and the random state as they were."""
    random = random_state()
    gradients = [(p, p.grad) for p in model.parameters()]
    values = [(x, x.detach().to("cpu", copy=True)) for x in weight_tensors(model)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for x, value in values:
                x.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        set_random_state(random)


def _allocated(step: Callable[[], None], snapshot: Path | None) -> int:
    """The CUDA allocator's peak of one step."""
    if snapshot is not None:
        torch.cuda.memory._record_memory_history()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    if snapshot is not None:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
    return torch.cuda.max_memory_allocated()

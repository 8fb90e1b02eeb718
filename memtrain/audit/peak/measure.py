"""The peak of a training step, measured on a real one."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept.compiler_internals import inside_compiled
from memtrain.activations.trace.fake_copies import copy_optimizer
from memtrain.activations.trace.restored import attributes_restored, random_states_restored
from memtrain.api import unwrap, wrap
from memtrain.audit.allocations import Allocations
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors, weight_tensors
from memtrain.audit.peak.timeline import ALLOCATED, INPUTS, STATES, WEIGHTS, Moment, Phase, Timeline
from memtrain.audit.peak.training_step import StepOptions, check, master_weights, run_step
from memtrain.optim.states.first_step import inner_optimizer


def measure(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    cfg: Any = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Timeline:
    """Run two training steps and read the peak of the second from torch's allocators.

    Unlike in `predict`, no mode or hook is added. On a CPU torch's profiler reports each allocation
    of this thread, also inside ops. On CUDA the caching allocator reports the peak of each phase.
    Afterwards weights, buffers, gradients, attributes and random states are as before; a copy of
    the optimizer steps. Weights and buffers are copied to host memory meanwhile.

    The model is real, compiled or not, and not wrapped. The batch is on its device. The optimizer
    has no parameters of other models. The result has one moment per phase, the highest.

    Raises:
        ValueError: If the model is fake or wrapped, or the config is not valid.
        TypeError: If the batch has no tensor.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> measure(model, optimizer, torch.ones(32, 64), "balanced").peak.phase
        'backward'
    """
    inner = inside_compiled(model) or model
    check(inner, batch)
    optimizer = inner_optimizer(optimizer)
    if any(isinstance(x, FakeTensor) or x.is_meta for x in weight_tensors(inner)):
        raise ValueError(f"{type(inner).__name__} has no data: only a real model can be measured")
    device = next(inner.parameters()).device
    inputs = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    highest: dict[Phase, tuple[int, str]] = {}
    now: Phase = "forward"

    def begin(phase: Phase) -> None:
        nonlocal now
        highest[now] = max(highest.get(now, (0, "")), live.restart())
        now = phase

    with _restored(inner), Allocations(device) as live:
        live.adopt([x for x in (*weight_tensors(inner), *inputs) if x.device == device])
        optimizer = copy_optimizer(optimizer, {id(p): p for p in inner.parameters()})
        if cfg is not None:
            model, optimizer = wrap(model, optimizer, cfg)
        try:
            run_step(model, optimizer, batch, options)
            optimizer.zero_grad(set_to_none=True)
            gc.collect()  # cycles of the first step would be freed within the second
            weights = [*weight_tensors(inner), *master_weights(optimizer)]
            parts = {
                WEIGHTS: storage_nbytes(weights),
                STATES: storage_nbytes(state_tensors(optimizer), exclude=weights),
                INPUTS: storage_nbytes(inputs),
            }
            live.restart(sum(parts.values()))
            run_step(model, optimizer, batch, options, begin)
        finally:
            if cfg is not None:
                unwrap(model, optimizer)
    moments = (_moment(phase, *at, parts) for phase, at in highest.items())
    reserved = torch.cuda.memory_reserved() if device.type == "cuda" else None
    return Timeline(tuple(moments), reserved=reserved)


def _moment(phase: Phase, nbytes: int, op: str, parts: dict[str, int]) -> Moment:
    parts = {**parts, ALLOCATED: nbytes - sum(parts.values())}
    label = f"{phase}, in {op}" if op else phase
    return Moment(label, phase, nbytes, {name: size for name, size in parts.items() if size})


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore weights, buffers, gradients, attributes and random states afterwards."""
    gradients = [(p, p.grad) for p in model.parameters()]
    values = [(x, x.detach().to("cpu", copy=True)) for x in weight_tensors(model)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_states_restored(), attributes_restored(model):
            yield
    finally:
        with torch.no_grad():
            for x, value in values:
                x.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient

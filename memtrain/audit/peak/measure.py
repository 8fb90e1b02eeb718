"""The peak of a training step, measured on a real one."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from memtrain.audit.allocations import cpu_allocations
from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors, weight_tensors
from memtrain.audit.peak.timeline import ALLOCATED, INPUTS, STATES, WEIGHTS, Moment, Phase, Timeline
from memtrain.audit.peak.training_step import StepOptions, check, run_step
from memtrain.optim.states.first_step import inner_optimizer


def measure(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    cfg: Any = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Timeline:
    """Run two training steps and ask torch's allocators for the peak of the second.

    The steps run as they do without a measurement: no mode or hook is added, unlike in `predict`.
    On a CPU torch's profiler reports each allocation of this thread, those inside ops too. On CUDA
    the caching allocator reports the peak of each phase. Afterwards weights, buffers, gradients,
    attributes and random states are as before; a copy of the optimizer steps.

    Args:
        model: Real; not wrapped. Compiled or not.
        optimizer: Its optimizer; all its parameters must be the model's.
        batch: What the model is called with, on its device.
        cfg: Anything that `memtrain.wrap` takes; None for plain PyTorch.
        options: Autocast, and the loss; the device is the model's.

    Returns:
        One moment per phase, the highest.

    Raises:
        ValueError: If the model is fake or wrapped, or for a config that is not valid.
        TypeError: If the batch holds no tensor.

    Memory:
        That of the steps, and a copy of weights and buffers in host memory.

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
    on_cuda = next(inner.parameters()).is_cuda
    before = torch.cuda.memory_allocated() if on_cuda else 0
    inputs = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    own = storage_nbytes([x for x in (*weight_tensors(inner), *inputs) if x.is_cuda])
    follow = nullcontext() if on_cuda else cpu_allocations()
    with _put_back(inner), follow as since:
        optimizer = copy_optimizer(optimizer, {id(p): p for p in inner.parameters()})
        if cfg is not None:
            model, optimizer = wrap(model, optimizer, cfg)
        try:
            run_step(model, optimizer, batch, options)
            optimizer.zero_grad(set_to_none=True)
            gc.collect()  # cycles of the first step would be freed within the second
            parts = {
                WEIGHTS: storage_nbytes(weight_tensors(inner)),
                STATES: storage_nbytes(state_tensors(optimizer), exclude=weight_tensors(inner)),
                INPUTS: storage_nbytes(inputs),
            }
            phases = _OnCuda(parts, before - own) if since is None else _OnCpu(parts, since)
            run_step(model, optimizer, batch, options, phases.begin)
            return phases.timeline()
        finally:
            if cfg is not None:
                unwrap(model, optimizer)


class _OnCpu:
    """The highest moment of each phase, from a list of allocations."""

    def __init__(self, parts: dict[str, int], since: Callable[[], list[tuple[str, int]]]) -> None:
        since()
        self.parts, self.since = parts, since
        self.now = sum(parts.values())
        self.phase: Phase = "forward"
        self.highest: dict[Phase, tuple[int, str]] = {}

    def begin(self, phase: Phase) -> None:
        """Read what the phase before has allocated."""
        for op, nbytes in self.since():
            self.now += nbytes
            if self.now > self.highest.get(self.phase, (0, ""))[0]:
                self.highest[self.phase] = self.now, op
        self.phase = phase

    def timeline(self) -> Timeline:
        """The moments."""
        found = [self._moment(phase, *at) for phase, at in self.highest.items()]
        return Timeline(tuple(found), reserved=self.reserved())

    def reserved(self) -> int | None:
        """Bytes that the allocator took of the device."""
        return None

    def _moment(self, phase: Phase, nbytes: int, op: str) -> Moment:
        parts = {**self.parts, ALLOCATED: nbytes - sum(self.parts.values())}
        label = f"{phase}, in {op}" if op else phase
        return Moment(label, phase, nbytes, {name: size for name, size in parts.items() if size})


class _OnCuda(_OnCpu):
    """The highest moment of each phase, as the caching allocator counts it."""

    def __init__(self, parts: dict[str, int], others: int) -> None:
        super().__init__(parts, list)
        self.others = others
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def begin(self, phase: Phase) -> None:
        """Read the peak of the phase before."""
        torch.cuda.synchronize()
        highest = torch.cuda.max_memory_allocated() - self.others
        self.highest[self.phase] = max(self.highest.get(self.phase, (0, "")), (highest, ""))
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def reserved(self) -> int | None:
        """Bytes that the allocator took of the device, in these steps or before."""
        return torch.cuda.memory_reserved()


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Leave weights, buffers, gradients, attributes and the random states as they were."""
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

"""The peak of a training step, before anything runs."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.api import wrap
from memtrain.kernels import cpu
from memtrain.peak.recorder import Recorder
from memtrain.peak.step import Step, StepOptions
from memtrain.peak.timeline import Timeline, replay
from memtrain.peak.twin import twin


def predict(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    cfg: Any = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Timeline:
    """Simulate a training step on fake tensors and tell what is alive at each moment.

    Args:
        model: Real, or built under a `FakeTensorMode`; not changed.
        optimizer: Its optimizer; not changed.
        batch: What the model is called with: a tensor, a tuple of arguments or a dict of keyword
            arguments, real or fake.
        cfg: Anything that `memtrain.wrap` takes; None for plain PyTorch.
        options: Autocast, and the loss.

    Returns:
        The timeline of the second step: the first makes the optimizer's states.

    Memory:
        That of the names and numbers of the tensors: none of them is allocated.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> predict(model, optimizer, torch.ones(32, 64)).peak.label
        'step'
        >>> predict(model, optimizer, torch.ones(32, 64), "balanced").peak.label
        'backward of 0 / addmm'
    """
    with twin(model, optimizer, batch) as own, cpu.without_data():
        model, optimizer = own.model, own.optimizer
        if cfg is not None:
            model, optimizer = wrap(model, optimizer, cfg)
        step = Step(model, optimizer, own.batch, options)
        first = Recorder(model, fake=True)
        with first:
            step.run(first)
        recorder = Recorder(model, fake=True)
        step.record(recorder)
    return replay(recorder.events, recorder.categories)

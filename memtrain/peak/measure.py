"""The peak of a training step, measured on a real one."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.api import unwrap, wrap
from memtrain.peak.recorder import Recorder
from memtrain.peak.step import Step, StepOptions
from memtrain.peak.timeline import Timeline, replay


def measure(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    cfg: Any = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Timeline:
    """Run two training steps and tell what was alive at each moment of the second.

    Args:
        model: Real.
        optimizer: Its optimizer.
        batch: What the model is called with, on its device.
        cfg: Anything that `memtrain.wrap` takes; None for plain PyTorch.
        options: Autocast, and the loss.

    Returns:
        The timeline.
    """
    if cfg is not None:
        model, optimizer = wrap(model, optimizer, cfg)
    step = Step(model, optimizer, batch, options)
    step.run()
    recorder = Recorder(model)
    step.record(recorder)
    if cfg is not None:
        unwrap(model, optimizer)
    return replay(recorder.events, recorder.categories)

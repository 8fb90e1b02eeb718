"""One training step, recorded phase by phase: the same for a fake and for a real model."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.audit.live_tensors import gradient_tensors, state_tensors, weight_tensors
from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.audit.peak.timeline import GRADIENTS, INPUTS, NOTHING, SAVED, STATES, WEIGHTS, Phase
from memtrain.optim.wrappers.host_states import HostStates, releasing
from memtrain.optim.wrappers.weights import SplitWeights
from memtrain.wrapped import ATTRIBUTE

DEVICES = ("cpu", "cuda", "cuda:sm_90")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Device, autocast and loss of a training step."""

    device: str | None = None
    """Where a predicted step runs: `cpu`, `cuda` (its forms as in `peak.cuda`) or `cuda:sm_90`;
    where the model lies by default."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast` around the forward; None without."""
    loss: Callable[[Any], Tensor] | None = None
    """Loss of a model's output; by default `default_loss`."""
    accumulated: bool = False
    """Whether gradients of an earlier microbatch are there, which the step adds to."""
    context: int = 512 * 2**20
    """Bytes of a CUDA device that its context, loaded kernels and other processes take: they are
    no tensors', and a budget and a memory are the whole device's."""

    def __post_init__(self) -> None:
        if self.device not in (None, *DEVICES):
            raise ValueError(f"unknown device {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.context < 0:
            raise ValueError(f"context={self.context} is out of range; allowed: 0 or more")

    def on_cuda(self, model: nn.Module) -> bool:
        """Whether a predicted step of this model runs on CUDA."""
        return (self.device or next(model.parameters()).device.type).startswith("cuda")

    def autocasting(self, device: str) -> AbstractContextManager[Any]:
        """Enter the autocast of a forward."""
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)


def default_optimizer(model: nn.Module) -> Optimizer:
    """Return `torch.optim.AdamW` of the parameters that are trained."""
    return AdamW([p for p in model.parameters() if p.requires_grad])


def run_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    begin: Callable[[Phase], None] = lambda phase: None,
    recorder: StorageRecorder | None = None,
) -> None:
    """Run one step: forward, backward, update; gradients from nothing unless they accumulate.

    Args:
        model: Real or fake; as optimizer and batch.
        optimizer: Its optimizer.
        batch: What the model is called with.
        options: Autocast, and the loss.
        begin: Called where a phase begins, and with `step` when the step has ended.
        recorder: Categorises what the forward saves, and corrects the step for its device.
    """
    if not options.accumulated:
        optimizer.zero_grad(set_to_none=True)
    device = next(model.parameters()).device.type
    corrections = nullcontext if recorder is None else recorder.corrections

    def closure() -> Tensor:
        begin("forward")
        args, kwargs = call_arguments(batch)
        with corrections(), options.autocasting(device):
            loss = (options.loss or default_loss)(model(*args, **kwargs))
        if recorder is not None:
            recorder.keep(SAVED)
        begin("backward")
        with torch.enable_grad(), corrections():
            loss.backward() if recorder is None else _backward(loss)
        return loss.detach()

    with torch.enable_grad():
        if wants_closure(optimizer):
            optimizer.step(closure)  # pyright: ignore[reportArgumentType, reportCallIssue]
        else:
            closure()
            begin("step")
            optimizer.step()
    begin("step")


def record_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    recorder: StorageRecorder,
) -> set[Tensor]:
    """Run one step under a recorder, from the states that the optimizer has.

    The arguments are those of `run_step`. Returns the parameters that got a gradient.
    """
    trained: set[Tensor] = set()

    def arrived(parameter: Tensor) -> None:
        trained.add(parameter)
        recorder.adopt([parameter.grad] if parameter.grad is not None else [], GRADIENTS)

    handles = [_first(p, arrived) for p in model.parameters() if p.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    try:
        _adopt_states(recorder, optimizer)
        recorder.adopt(weight_tensors(model), WEIGHTS)
        recorder.adopt([x for x in tree_leaves(batch) if isinstance(x, Tensor)], INPUTS)
        if options.accumulated and releasing(optimizer) is None:
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.requires_grad else None
            recorder.adopt(gradient_tensors(model), GRADIENTS)
        with recorder:
            run_step(model, optimizer, batch, options, recorder.begin, recorder)
            recorder.adopt(gradient_tensors(model), GRADIENTS)
            _adopt_states(recorder, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    return trained


def _adopt_states(recorder: StorageRecorder, optimizer: Optimizer) -> None:
    """States, and what belongs to weights but is held by the optimizer."""
    elsewhere = recorder.separate_host and isinstance(optimizer, HostStates)
    recorder.adopt(state_tensors(optimizer), NOTHING if elsewhere else STATES)
    recorder.adopt(_held_weights(optimizer), NOTHING if elsewhere else WEIGHTS)


def _backward(loss: Tensor) -> None:
    """`loss.backward()`, but not as a function that a mode is given, and is off meanwhile."""
    gradient = torch.ones_like(loss)
    run = torch.autograd.graph._engine_run_backward
    run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def default_loss(output: Any) -> Tensor:
    """Take the loss that a model computes itself, else the sum of its first output.

    Raises:
        TypeError: If there is no tensor of a float type that needs a gradient.

    Example:
        >>> default_loss({"loss": torch.ones((), requires_grad=True)}).item()
        1.0
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss if loss.numel() == 1 else loss.sum()
    for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf.sum()
    raise TypeError(
        f"the model returned a {type(output).__name__} without a tensor to differentiate; "
        "loss= takes a function that maps the output to the loss"
    )


def check(model: nn.Module, batch: Any) -> None:
    """Raise ValueError for a model that is wrapped already, and TypeError for no batch."""
    if any(hasattr(module, ATTRIBUTE) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} is wrapped already; call unwrap(model, optimizer) first "
            "(cfg= is the config of the prediction)"
        )
    check_batch(batch)


def check_batch(batch: Any) -> None:
    """Raise TypeError unless a batch holds a tensor or is empty."""
    leaves = tree_leaves(batch)
    if leaves and not any(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            f"the batch is a {type(batch).__name__} of {', '.join(kinds)}; allowed: a tensor, a "
            "tuple of arguments or a dict of keyword arguments with tensors among them"
        )


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer runs forward and backward itself, perhaps more than once."""
    release = releasing(optimizer)
    return (release is not None and release.clip == "two_pass") or isinstance(optimizer, LBFGS)


def _first(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """A hook for a complete gradient, before the one that releases it."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    others = [(number, other) for number, other in hooks.items() if number != handle.id]
    for number, other in others:  # put in anew: torch goes by the order of insertion
        del hooks[number]
        hooks[number] = other
    return handle


def _held_weights(optimizer: Any) -> list[Tensor]:
    """The lower bits of split weights, and copies of weights in host memory."""
    found: list[Tensor] = []
    while optimizer is not None:
        if isinstance(optimizer, HostStates):
            params = (p for group in optimizer.param_groups for p in group["params"])
            found += [leaf for p in params if (leaf := optimizer.host.leaves.get(p)) is not None]
        if isinstance(optimizer, SplitWeights):
            found += [x for x in optimizer.corrections.values() if x is not None]
        optimizer = getattr(optimizer, "inner", None)
    return found

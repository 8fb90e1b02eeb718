"""One training step by phases, for fake and for real models."""

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
    """The device of a predicted step: `cpu`, `cuda` or `cuda:sm_90`; by default the model's."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast` in the forward; None without autocast."""
    loss: Callable[[Any], Tensor] | None = None
    """The loss of a model's output; by default the output's `loss`, or the sum of its first
    tensor."""
    accumulated: bool = False
    """Whether the step adds to gradients of an earlier microbatch."""
    context: int = 512 * 2**20
    """Bytes of a CUDA device for the CUDA context, loaded kernels and other processes."""

    def __post_init__(self) -> None:
        if self.device not in (None, *DEVICES):
            raise ValueError(f"unknown device {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.context < 0:
            raise ValueError(f"context={self.context} is out of range; allowed: 0 or more")

    def on_cuda(self, model: nn.Module) -> bool:
        """Return whether a predicted step of this model runs on CUDA."""
        return (self.device or next(model.parameters()).device.type).startswith("cuda")

    def autocasting(self, device: str) -> AbstractContextManager[Any]:
        """Enter the autocast of a forward."""
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)


def default_optimizer(model: nn.Module) -> Optimizer:
    """Return `torch.optim.AdamW` with the trained parameters."""
    return AdamW([p for p in model.parameters() if p.requires_grad])


def run_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    begin: Callable[[Phase], None] = lambda phase: None,
    recorder: StorageRecorder | None = None,
) -> None:
    """Run one step: forward, backward, update; gradients are removed first unless they accumulate.

    `begin` is called at the beginning of each phase, and with `step` after the step. A recorder
    sets categories of saved tensors and corrects the step for its device.
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
    """Run one step under a recorder, and return the parameters with a gradient."""
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
    """Record the optimizer's states, and the parts of weights that the optimizer has."""
    on_host = recorder.separate_host and isinstance(optimizer, HostStates)
    recorder.adopt(state_tensors(optimizer), NOTHING if on_host else STATES)
    recorder.adopt(master_weights(optimizer), NOTHING if on_host else WEIGHTS)


def _backward(loss: Tensor) -> None:
    """Run `loss.backward()` without a torch function call, during which a mode would be off."""
    gradient = torch.ones_like(loss)
    run = torch.autograd.graph._engine_run_backward
    run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def default_loss(output: Any) -> Tensor:
    """Return the output's `loss`, else the sum of the first tensor that requires a gradient.

    Raises:
        TypeError: If there is no such tensor.
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
    """Raise ValueError for a wrapped model, and TypeError for a batch without tensors."""
    if any(hasattr(module, ATTRIBUTE) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} is wrapped already; call unwrap(model, optimizer) first "
            "(cfg= is the config of the prediction)"
        )
    check_batch(batch)


def check_batch(batch: Any) -> None:
    """Raise TypeError unless a batch has a tensor or is empty."""
    leaves = tree_leaves(batch)
    if leaves and not any(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            f"the batch is a {type(batch).__name__} of {', '.join(kinds)}; allowed: a tensor, a "
            "tuple of arguments or a dict of keyword arguments with tensors among them"
        )


def wants_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer runs forward and backward itself."""
    release = releasing(optimizer)
    return (release is not None and release.clip == "two_pass") or isinstance(optimizer, LBFGS)


def _first(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook for a complete gradient, before the hook that releases the gradient."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    others = [(number, other) for number, other in hooks.items() if number != handle.id]
    for number, other in others:  # inserted again: torch calls hooks in this order
        del hooks[number]
        hooks[number] = other
    return handle


def master_weights(optimizer: Any) -> list[Tensor]:
    """Return the lower bits of split weights, and copies of weights in host memory."""
    found: list[Tensor] = []
    while optimizer is not None:
        if isinstance(optimizer, HostStates):
            params = (p for group in optimizer.param_groups for p in group["params"])
            found += [leaf for p in params if (leaf := optimizer.host.leaves.get(p)) is not None]
        if isinstance(optimizer, SplitWeights):
            found += [x for x in optimizer.corrections.values() if x is not None]
        optimizer = getattr(optimizer, "inner", None)
    return found

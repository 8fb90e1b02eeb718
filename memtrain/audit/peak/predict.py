"""Prediction of the peak of a training step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.compiled_parts import compile_parts, compiled_parts
from memtrain.activations.trace.fake_copies import fake_copies
from memtrain.api import plan_of, wrap
from memtrain.audit.peak import allocator, cuda
from memtrain.audit.peak.op_workspace import cuda_workspace_of, workspace_of
from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.audit.peak.timeline import NOTHING, Timeline, replay
from memtrain.audit.peak.training_step import (
    StepOptions,
    check,
    record_step,
    run_step,
    wants_closure,
)
from memtrain.kernels.dispatch import simulating
from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.states.optimizer_hooks import innermost

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_DISPATCH = FakeTensorMode.dispatch.__code__
MEASURE = "measure a real step instead: audit(..., measure=True), or memtrain-report --measure"


class UnpredictableError(ValueError):
    """The ops of a step depend on data: measure the step instead."""


def predict(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    cfg: Any = None,
    options: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Timeline:
    """Simulate a training step on fake tensors, and return the live bytes after each op.

    Forward, backward and the optimizer's step run under `FakeTensorMode` with the hooks of `wrap`,
    from the states after an earlier step and without gradients. On CUDA torch's caching allocator
    is simulated, too (`allocator`): `Timeline.needed` is the memory that the device must have free.
    Bytes that an op allocates and frees while it runs are declared or counted (`workspace_of`; on
    CUDA only for memtrain's ops).

    Compiled parts are compiled for the copies, and their graphs run op by op. The bytes that they
    keep between forward and backward are exact; temporaries are an upper bound (no ops are fused).

    Neither the model (real or fake, compiled or not) nor the optimizer is changed. `cfg` is
    anything that `memtrain.wrap` takes; None for the baseline.

    Raises:
        UnpredictableError: If the model's control flow depends on data or an op cannot run on fake
            tensors (the message names the op), for LBFGS, for a compiled model on CUDA, and for a
            backend with unknown graphs.
        ValueError: If the model is wrapped, or the config is not valid.
        TypeError: If the batch has no tensor.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> predict(model, optimizer, torch.ones(32, 64)).peak.label
        'step'
        >>> predict(model, optimizer, torch.ones(32, 64), "balanced").peak.label
        'backward of 0 / addmm'
    """
    check(model, batch)
    check_compiled(model, options)
    optimizer = inner_optimizer(optimizer)
    if isinstance(optimizer, LBFGS):
        raise UnpredictableError(f"how often LBFGS runs the model depends on data: {MEASURE}")
    model, parts = compiled_parts(model)
    on_cuda = options.on_cuda(model)
    copies = fake_copies(model, optimizer, batch)
    simulation = simulating("cuda" if on_cuda else "cpu")
    with explain_fake_errors(model), copies as (model, optimizer, batch), simulation:
        if on_cuda:
            for group in optimizer.param_groups:  # torch's own choice for CUDA tensors only
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
        if cfg is not None:
            model, optimizer = wrap(model, optimizer, cfg)
        compile_parts(model, parts)
        bits = cfg is not None and plan_of(model).bits is not None
        recorder = _recorded(model, optimizer, batch, options, on_cuda=on_cuda, assigns=bits)
    events, categories = recorder.events, recorder.categories
    if not on_cuda:
        return replay(events, categories)
    workspaces = cuda.workspaces(options.device or "cuda")
    timeline = replay(events, categories, unit=allocator.UNIT, workspaces=workspaces)
    blocks = [workspaces["forward"], workspaces["backward"] - workspaces["forward"]]
    reserved = allocator.reserved_nbytes(events, categories, blocks)
    return replace(timeline, reserved=reserved, context=options.context)


def _recorded(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    *,
    on_cuda: bool,
    assigns: bool,
) -> StorageRecorder:
    """Record the second step of fake copies; with `assigns`, the first sets automatic widths."""
    if on_cuda and not isinstance(innermost(optimizer), FusedStates):
        for group in optimizer.param_groups:  # torch's optimizers refuse it for CPU tensors
            group |= {"capturable": False} if "capturable" in group else {}
    recorder = partial(
        StorageRecorder, model, fake=True, corrections=cuda.CudaForms if on_cuda else nullcontext
    )
    first = recorder()
    if assigns or wants_closure(optimizer):
        with first:
            run_step(model, optimizer, batch, options, first.begin, first)
    else:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            param.grad = torch.empty_like(param) if param.requires_grad else param.grad
        first.begin("step")
        with first:
            optimizer.step()
    second = recorder(inside=cuda_workspace_of if on_cuda else workspace_of, separate_host=on_cuda)
    trained = record_step(model, optimizer, batch, options, second)
    # The first step gave states to every parameter, also to those without a gradient.
    unused = [state for param, state in optimizer.state.items() if param not in trained]
    second.adopt([x for x in tree_leaves(unused) if isinstance(x, Tensor)], NOTHING)
    return second


def check_compiled(model: nn.Module, options: StepOptions) -> None:
    """Raise `UnpredictableError` for a backend with unknown graphs, and for a step on CUDA."""
    try:
        _, parts = compiled_parts(model)
    except ValueError as error:
        raise UnpredictableError(f"{error}; {MEASURE}") from error
    if parts and options.on_cuda(model):
        raise UnpredictableError(
            f"device {options.device or 'cuda'!r}: compiled steps are predicted as a CPU runs "
            f"them; allowed for a compiled model: cpu; {MEASURE}"
        )


@contextmanager
def conditions(model: nn.Module, options: StepOptions) -> Iterator[None]:
    """Simulate the device of a forward on fake tensors, with CUDA forms and autocast."""
    on_cuda = options.on_cuda(model)
    corrections = cuda.CudaForms() if on_cuda else nullcontext()
    with simulating("cuda" if on_cuda else "cpu"), corrections, options.autocasting("cpu"):
        yield


@contextmanager
def explain_fake_errors(model: nn.Module) -> Iterator[None]:
    """Raise `UnpredictableError` for an op that fake tensors cannot run, with a remedy."""
    try:
        with _without_tracebacks():
            yield
    except RuntimeError as error:
        if (why := _why(error)) is None:
            raise
        raise UnpredictableError(f"{type(model).__name__} {why}: {MEASURE}") from error


def _why(error: RuntimeError) -> str | None:
    """Return the reason if fake tensors caused the error, else None."""
    first = str(error).partition("\n")[0].rstrip(".")
    if isinstance(error, DataDependentOutputException):
        return (
            f"reads a tensor's values ({error.func}), so what it runs depends on data and cannot "
            "be predicted"
        )
    if isinstance(error, DynamicOutputShapeException):
        return f"runs {error.func}, whose result's shape depends on data"
    if isinstance(error, UnsupportedOperatorException):
        return f"runs {error.func}, which has no fake form"
    if isinstance(error, UnsupportedFakeTensorException):
        return f"cannot run on fake tensors ({error.reason})"
    if ".numpy()" in first:
        return "takes a tensor's values out with .numpy()"
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    funcs = (frame.f_locals.get("func") for frame in frames if frame.f_code is _DISPATCH)
    op = next((func for func in funcs if isinstance(func, OpOverload)), None)
    return op and f"runs {op}, which fails ({first}). If it does not with data"


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Disable torch's logging of tracebacks in this thread: memtrain's error has the reason."""
    thread = get_ident()

    def from_other_thread(record: logging.LogRecord) -> bool:
        return get_ident() != thread  # a filter runs in the thread that logs

    _LOG.addFilter(from_other_thread)
    try:
        yield
    finally:
        _LOG.removeFilter(from_other_thread)

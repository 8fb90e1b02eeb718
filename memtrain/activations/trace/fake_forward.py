"""Forwards under fake tensors: the tensors that one would save, without its data or memory."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from memtrain.activations.intercept.compiler_internals import PLAIN, run_untraced
from memtrain.activations.intercept.hooks import Interception, Rounding
from memtrain.activations.intercept.options import Options
from memtrain.activations.intercept.recompute import recomputed
from memtrain.activations.saved.saved_tensors import Choose
from memtrain.activations.saved.site import Record, Site
from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.activations.trace.compiled_parts import compile_alike, compiled_parts
from memtrain.activations.trace.fake_copies import fake_copies
from memtrain.activations.trace.fake_results import RealResults
from memtrain.activations.trace.grouped_mm import known_to_fake_tensors
from memtrain.activations.trace.repeats import (
    Irregular,
    RepeatedBlocks,
    expanded,
    inside,
    refined,
    repeated_blocks,
    shortened,
    unlike,
)
from memtrain.activations.trace.transformers_masks import one_sequence_per_row
from memtrain.compressors import Compressor, Keep
from memtrain.kernels.dispatch import simulating
from memtrain.optim.wrappers.weights import cast_inputs


def trace(
    model: nn.Module,
    batch: Any,
    choose: Choose,
    options: Options = Options(),  # noqa: B008 (a frozen value)
    dtypes: Mapping[Tensor, torch.dtype] | None = None,
    rounding: Rounding | None = None,
    *,
    plain: bool = False,
) -> list[Record]:
    """Run one forward under fake tensors and list every tensor that it saves for backward.

    Nothing of the model is changed: fake parameters replace its own, and no random number is drawn.
    Parts of it that are compiled are compiled for a copy, and their graphs' saved tensors listed.

    Args:
        model: Real, on the meta device, or built under a `FakeTensorMode`; what `torch.compile`
            made of one, too.
        batch: What it is called with: a tensor, a tuple of arguments, or a dict of keyword
            arguments; real or fake.
        choose: Site -> compressor, or the reason to keep the tensor.
        options: How saved tensors are handled.
        dtypes: Parameters that are converted before training, with their dtype; float32 inputs
            are cast with them.
        rounding: What else is done to the ops.
        plain: Let compiled graphs save what they do without memtrain.

    Returns:
        One record per saved tensor, in the order of the forward.

    Raises:
        ValueError: If `fully_shard` was called on the model: its hooks would keep the fake tensors.

    Memory:
        That of the records: no tensor is allocated.

    Example:
        >>> from memtrain.compressors import Identity
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU())
        >>> records = trace(model, torch.ones(32, 64), lambda site: Identity())
        >>> [(record.site.name, record.nbytes) for record in records]
        [('0 / linear / input', 0), ('1 / gelu / input', 32768)]
    """
    model, parts = compiled_parts(model)
    _refuse_sharded(model)
    if parts:
        return _of_graphs(model, parts, batch, choose, options, dtypes, plain=plain)
    paths = recomputed(model, options.recompute)
    runs = [] if rounding is not None else repeated_blocks(model)
    runs = refined(runs, lambda block: [p[len(block) :] for p in paths if inside(p, block)])
    while True:
        choices: dict[Site, Compressor | Keep] = {}
        try:
            found = _traced(model, batch, choose, options, dtypes, rounding, runs, choices)
            records = expanded(found, runs)
        except Irregular:
            runs = []  # each block for itself
            continue
        finer = unlike(runs, choices, choose)
        if finer is None:
            return records
        runs = finer


def _traced(  # noqa: PLR0913 - what `trace` is given, and two more
    model: nn.Module,
    batch: Any,
    choose: Choose,
    options: Options,
    dtypes: Mapping[Tensor, torch.dtype] | None,
    rounding: Rounding | None,
    runs: Sequence[RepeatedBlocks],
    choices: dict[Site, Compressor | Keep],
) -> list[Record]:
    """One forward through the kept blocks of runs; `choices` gets what is chosen for each site."""

    def ask(site: Site) -> Compressor | Keep:
        choices[site] = choose(site)
        return choices[site]

    records: list[Record] = []
    interception = Interception(
        model,
        ask,
        options=options,
        seed=0,
        on_saved=records.extend,
        rounding=rounding,
    )
    args, kwargs = call_arguments(batch)
    one_row = one_sequence_per_row(kwargs)
    with _fake_mode(model) as fake, RealResults(), simulating(), torch.enable_grad(), one_row:
        state = {
            name: _converted(_as_fake(fake, x), (dtypes or {}).get(x))
            for name, x in (*model.named_parameters(), *model.named_buffers())
        }
        args, kwargs = tree_map_only(Tensor, lambda x: _as_fake(fake, x), (args, kwargs))
        low = next(iter(dtypes.values()), None) if dtypes else None
        with (
            _attributes_restored(model),
            interception.alone(),
            _inputs_cast(model, low),
            shortened(model, runs),
        ):
            functional_call(model, state, args, kwargs, tie_weights=True)
    return records


def _of_graphs(
    model: nn.Module,
    parts: Mapping[str, Any],
    batch: Any,
    choose: Choose,
    options: Options,
    dtypes: Mapping[Tensor, torch.dtype] | None,
    *,
    plain: bool,
) -> list[Record]:
    """One forward of a copy whose parts are compiled as the model's are."""
    records: list[Record] = []
    named = {name: (dtypes or {}).get(x) for name, x in model.named_parameters()}
    copies = fake_copies(model, None, batch)
    with copies as (model, _, batch), simulating(), torch.enable_grad():
        for name, parameter in model.named_parameters():
            parameter.data = _converted(parameter, named[name]).data
        args, kwargs = call_arguments(batch)
        low = next(iter(dtypes.values()), None) if dtypes else None
        interception = Interception(model, choose, options=options, seed=0, on_saved=records.extend)
        if plain:
            interception.graphs.settings = PLAIN
        with interception.alone(), _inputs_cast(model, low):
            compile_alike(model, parts)
            model(*args, **kwargs)
    return records


def _refuse_sharded(model: nn.Module) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is sharded by fully_shard, and its forward cannot run without "
            "data: audit it, or plan it with a batch, before fully_shard"
        )


@contextmanager
def _inputs_cast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the model's float32 inputs in its forward, as its converted weights need."""
    if dtype is None:
        yield
        return
    handle = model.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore modules' own attributes: a cache filled in the forward would hold fake tensors."""
    internal = vars(nn.Module())
    before = {
        module: {
            name: (value, copy.copy(value) if type(value) in (dict, list, set) else None)
            for name, value in vars(module).items()
            if name not in internal
        }
        for module in model.modules()
    }
    try:
        yield
    finally:
        for module, attributes in before.items():
            for name in [name for name in vars(module) if name not in internal]:
                if name not in attributes:
                    del vars(module)[name]
            for name, (value, content) in attributes.items():
                vars(module)[name] = value
                if content is not None:
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)


def _fake_mode(model: nn.Module) -> FakeTensorMode:
    found = detect_fake_mode(list(model.parameters()))
    return found or FakeTensorMode(allow_non_fake_inputs=True)


def _converted(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or x.dtype != torch.float32:
        return x
    low = x.detach().to(dtype)
    return nn.Parameter(low, x.requires_grad) if isinstance(x, nn.Parameter) else low


def _as_fake(mode: FakeTensorMode, x: Tensor) -> Tensor:
    if getattr(x, "fake_mode", None) is mode:
        return x
    if x.is_meta:  # of a step on the CPU: autocast and kernels know no meta device
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    else:
        fake = mode.from_tensor(x)
    return nn.Parameter(fake, x.requires_grad) if isinstance(x, nn.Parameter) else fake


run_untraced(cast_inputs)
known_to_fake_tensors()

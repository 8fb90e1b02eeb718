"""Forwards under fake tensors: the tensors that one would save, without its data or memory."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.activations.intercept.compiler_internals import PLAIN, run_untraced
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.saved.fit import Choose
from memtrain.activations.saved.options import Options
from memtrain.activations.saved.site import Record
from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.activations.trace.compiled_parts import compile_parts, compiled_parts
from memtrain.activations.trace.fake_copies import fake_copies
from memtrain.activations.trace.fake_results import RealResults, known_to_fake_tensors
from memtrain.kernels.dispatch import simulating
from memtrain.optim.wrappers.dtypes import cast_inputs, hook, restore_outputs


def trace(  # noqa: PLR0913 (each has a default that serves)
    model: nn.Module,
    batch: Any,
    choose: Choose,
    options: Options = Options(),  # noqa: B008 (a frozen value)
    dtypes: Mapping[Tensor, torch.dtype] | None = None,
    rounding: Any = None,
    *,
    plain: bool = False,
    observe: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
) -> list[Record]:
    """Run one forward under fake tensors and list every tensor that it saves for backward.

    A fake copy of the model runs (`fake_copies`), so that nothing of the model is changed. Its
    compiled parts are compiled for the copy, and the saved tensors of their graphs are listed.

    The model may be real, on the meta device, built under a `FakeTensorMode`, or the result of
    `torch.compile`. `dtypes` maps parameters that are converted before training to their dtype;
    float32 inputs are cast with them. If `plain`, compiled graphs save what they do without
    memtrain. `observe` is entered around the forward, with the copy that runs. Records are in the
    order of the forward.

    Example:
        >>> from memtrain.compressors import Identity
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU())
        >>> records = trace(model, torch.ones(32, 64), lambda site: Identity())
        >>> [(record.site.name, record.nbytes) for record in records]
        [('0 / linear / input', 0), ('1 / gelu / input', 32768)]
    """
    model, parts = compiled_parts(model)
    _refuse_sharded(model)
    named = {name: dtypes[x] for name, x in model.named_parameters() if dtypes and x in dtypes}
    records: list[Record] = []
    # A dispatch mode would keep Dynamo from compiling.
    sized = nullcontext() if parts else RealResults()
    copies = fake_copies(model, None, batch)
    with copies as (copy, _, fake), sized, simulating(), torch.enable_grad():
        for name, x in copy.named_parameters():
            if name in named and x.dtype == torch.float32:
                x.data = x.detach().to(named[name])
        interception = Interception(
            copy,
            choose,
            options=options,
            seed=0,
            on_saved=records.extend,
            rounding=rounding,
        )
        if plain:
            interception.graphs.settings = PLAIN
        args, kwargs = call_arguments(fake)
        watch = nullcontext() if observe is None else observe(copy)
        with interception.alone(), watch:
            for low in {*named.values()}:
                hook(copy, low)  # the model's inputs, as converted weights need
            compile_parts(copy, parts)
            copy(*args, **kwargs)
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


run_untraced(cast_inputs, restore_outputs)
known_to_fake_tensors()

"""What `memtrain-report model=...` names: a model without memory, and what it is called with."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memtrain.cli.models.families import FAMILIES
from memtrain.cli.models.hugging_face import from_family, stored
from memtrain.cli.report.request_fields import DTYPES, OPTIMIZERS, Request
from memtrain.config.sources import nearest


class Built(NamedTuple):
    """A model of fake tensors, its optimizer, and what it is called with."""

    model: nn.Module
    optimizer: Optimizer
    batch: Any


def build(request: Request, *, real: bool = False) -> Built:
    """Make what a request names, under fake tensors: no weight is allocated.

    Args:
        request: What to make.
        real: Make it with its memory and with initial weights instead.

    Returns:
        Model in training mode, optimizer and batch.

    Raises:
        ValueError: For an unknown model, or a size that the model does not take.
        ModuleNotFoundError: If transformers is missing and needed; names the extra.
        FileNotFoundError: For an `hf:` path that does not exist.
        TypeError: If a builder returns something else than a model and a batch.

    Memory:
        Python objects only, unless `real`.
    """
    kind, _, rest = request.model.partition(":")
    with context(DTYPES[request.dtype], real=real):
        if kind == "py" and rest:
            model, batch, *others = _user(rest, request)
        elif kind == "hf" and rest:
            model, batch = from_family(stored(Path(rest)), request)
            others = []
        elif request.model in FAMILIES:
            model, batch = from_family(FAMILIES[request.model], request)
            others = []
        else:
            hint = nearest(request.model, known_models())
            raise ValueError(f"unknown model {request.model!r}; {hint}")
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = others[0] if others else OPTIMIZERS[request.optimizer](trained)
    return Built(model, optimizer, batch)


def known_models() -> list[str]:
    """What `model=` can be."""
    return [*FAMILIES, "hf:<config.json or its folder>", "py:<module>:<builder>"]


@contextmanager
def context(dtype: torch.dtype, *, real: bool) -> Iterator[None]:
    """Where models are built: under fake tensors, unless `real`.

    Args:
        dtype: The default one within.
        real: With memory, and initial values.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if real:
            yield
        else:
            with FakeTensorMode(allow_non_fake_inputs=True), _RealTables():
                yield
    finally:
        torch.set_default_dtype(before)


class _RealTables(TorchFunctionMode):
    """Computes `linspace`, and what comes of it, with values.

    Models read the rates of stochastic depth off it while they are built.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        valued = tensors and not any(isinstance(x, FakeTensor) for x in tensors)
        with unset_fake_temporarily() if valued or func is torch.linspace else nullcontext():
            return func(*args, **(kwargs or {}))


def _user(where: str, request: Request) -> tuple[Any, ...]:
    """Call a user's builder with those of the request's values that it has arguments for."""
    module, _, name = where.partition(":")
    if not name:
        raise ValueError(f"model='py:{where}' names no builder; allowed: py:<module>:<builder>")
    if "" not in sys.path:  # a console script does not look into the working directory
        sys.path.insert(0, "")
    builder = getattr(importlib.import_module(module), name, None)
    if not callable(builder):
        raise ValueError(f"model='py:{where}': {module} has no function {name!r}")
    known = set(inspect.signature(builder).parameters)
    values = {"batch": request.batch, "seq": request.seq, "image": request.image}
    result: Any
    try:
        result = builder(**{k: v for k, v in values.items() if k in known and v is not None})
    except Exception as error:  # the user's code may raise anything
        why = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(f"model='py:{where}' raised {type(error).__name__}: {why}") from error
    sound = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)
    if not sound or not isinstance(([*result, None])[2], Optimizer | None):
        raise TypeError(
            f"model='py:{where}' returned {type(result).__name__}; allowed: (model, batch) or "
            "(model, batch, optimizer)"
        )
    return result

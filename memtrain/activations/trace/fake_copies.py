"""Fake copies of a model, its optimizer and a batch: no memory, no data."""

import copy
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.activations.trace.restored import random_states_restored
from memtrain.activations.trace.transformers_masks import one_sequence_per_row


@contextmanager
def fake_copies(
    model: nn.Module, optimizer: Optimizer | None, batch: Any
) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Copy to fake tensors, under a `FakeTensorMode`; the copies can be wrapped and run.

    Nothing that runs inside the block reaches the originals. The random states of torch, NumPy and
    Python are restored, and `functools` caches that then hold fake tensors are cleared.

    A model may be fake already. States that the optimizer has are copied as fake ones.

    Example:
        >>> with fake_copies(nn.Linear(2, 2), None, torch.ones(1, 2)) as (model, _, batch):
        ...     print(model(batch).shape, type(model.weight).__name__)
        torch.Size([1, 2]) FakeTensor
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with caches_cleared(), random_states_restored(), mode:
        with _FakeDeepCopy():
            for x in model.parameters():
                memo[id(x)] = nn.Parameter(_fake(x), x.requires_grad)
            for x in model.parameters():
                if issubclass(type(x), nn.Parameter):  # a quantised one has its scales
                    vars(memo[id(x)]).update(copy.deepcopy(vars(x), memo))
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    memo[id(module)] = _Unreplicated(copy.deepcopy(module.module, memo))
            copies = (
                _copied(model, memo),
                None if optimizer is None else copy_optimizer(optimizer, memo),
                tree_map_only(Tensor, lambda x: copy.deepcopy(x, memo), batch),
            )
        with one_sequence_per_row(call_arguments(batch)[1]):
            yield copies


class _Unreplicated(nn.Module):
    """Runs the module of a `DistributedDataParallel`, whose reducer must not see a fake copy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except TypeError as error:  # a lock, a file, a generator
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}), and a prediction runs a copy; "
            "allowed: a model that copy.deepcopy takes"
        ) from error


@contextmanager
def caches_cleared() -> Iterator[None]:
    """Clear the `functools` caches that contain fake tensors when the block ends.

    Finding the caches takes a visit to every object of the process. Of the blocks inside another
    block only the first one does it.

    Example:
        >>> @functools.cache
        ... def positions():
        ...     return torch.ones(2)
        >>> with caches_cleared(), FakeTensorMode():
        ...     _ = positions()
        >>> positions.cache_info().currsize
        0
    """
    outer = _caches.get()
    token = _caches.set([]) if outer is None else None
    try:
        yield
    finally:
        if token is not None:
            _caches.reset(token)
        caches = [] if outer is None else outer
        caches += () if caches else _all_caches()
        for cache in caches:
            if _has_fake(cache):
                cache.cache_clear()


_caches: ContextVar[list[Any] | None] = ContextVar("_caches", default=None)
"""The caches that the first block inside the outermost block has found."""
_CONTAINERS = (dict, tuple, list, set, frozenset)
_DEPTH = 5
"""Containers inside a cache, itself included, in which fake tensors are found."""


def _all_caches() -> list[Any]:
    kind = functools._lru_cache_wrapper
    return [x for x in gc.get_referrers(kind) if type(x) is kind]


def _has_fake(cache: Any) -> bool:
    """Return whether a key or a value of a `functools` cache is or contains a fake tensor."""
    found = [cache] if cache.cache_info().currsize else []
    for _ in range(_DEPTH):
        found = gc.get_referents(*found)
        if any(isinstance(x, FakeTensor) for x in found):
            return True
        found = [x for x in found if isinstance(x, _CONTAINERS)]
    return False


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer deeply, with a subclass's own attributes, which torch leaves out.

    The memo, as for `copy.deepcopy`, maps the id of a parameter to its copy.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> copy_optimizer(torch.optim.LBFGS([weight]), {id(weight): weight})._params[0] is weight
        True
    """
    new = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(new) and name != "step":  # a scheduler's, bound to the original
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


class _FakeDeepCopy(TorchFunctionMode):
    """Lets `copy.deepcopy` make a fake tensor of each tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return _fake(args[0]).requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))


def _fake(x: Tensor) -> Tensor:
    """Return a fake tensor like `x`, on the CPU: fake CUDA tensors need a CUDA build of torch."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

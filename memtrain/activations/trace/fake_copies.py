"""Fake copies of a model, its optimizer and a batch: no memory, no data."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.activations.trace.transformers_masks import one_sequence_per_row


@contextmanager
def fake_copies(
    model: nn.Module, optimizer: Optimizer | None, batch: Any
) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Copy to fake tensors, under a `FakeTensorMode`; the copies can be wrapped and run.

    Args:
        model: Real or fake; not changed.
        optimizer: Its optimizer; not changed. States that it has are copied as fake ones. None
            where none is needed.
        batch: Tensors in any nesting.

    Yields:
        The copies of the three.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode, one_sequence_per_row(call_arguments(batch)[1]):
        leaves = (x for x in tree_leaves(batch) if isinstance(x, Tensor))
        for x in (*_tensors(model, optimizer), *leaves):
            if id(x) not in memo:
                memo[id(x)] = _fake(x)
        for x in filter(_is_special, model.parameters()):
            for name, value in vars(x).items():
                setattr(memo[id(x)], name, copy.deepcopy(value, memo))
        yield (
            copy.deepcopy(model, memo),
            None if optimizer is None else copy_optimizer(optimizer, memo),
            tree_map_only(Tensor, lambda x: memo[id(x)], batch),
        )


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer deeply, with a subclass's own attributes, which torch leaves out.

    Args:
        optimizer: Not changed.
        memo: As for `copy.deepcopy`: id of a parameter -> what stands for it in the copy.

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


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Every tensor that a copy would allocate."""
    yield from model.parameters()
    yield from model.buffers()
    for parameter in filter(_is_special, model.parameters()):
        yield from _beside(vars(parameter))
    for module in model.modules():
        internal = ("_parameters", "_buffers", "_modules")
        own = {name: value for name, value in vars(module).items() if name not in internal}
        yield from (x for x in tree_leaves(own) if isinstance(x, Tensor))
    for state in () if optimizer is None else optimizer.state.values():
        yield from (x for x in tree_leaves(state) if isinstance(x, Tensor))


def _is_special(x: Tensor) -> bool:
    """Whether a parameter is of a class of its own, as quantised ones that hold their scales."""
    return type(x) is not nn.Parameter and issubclass(type(x), nn.Parameter)


def _beside(value: Any) -> Iterator[Tensor]:
    """Tensors in attributes of a parameter, and in those of plain objects there."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            yield from _beside(vars(leaf))


def _fake(x: Tensor) -> Tensor:
    """A fake tensor like `x`, on the CPU: fake CUDA tensors need a CUDA build of torch."""
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, nn.Parameter):
        return nn.Parameter(fake, x.requires_grad)
    return fake.requires_grad_(x.requires_grad)

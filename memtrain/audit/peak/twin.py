"""A model, its optimizer and a batch, stood in for by fake ones: no memory, no data."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.trace.fake_forward import arguments
from memtrain.activations.trace.transformers_masks import one_sequence_per_row


class Twin(NamedTuple):
    """What `twin` gives."""

    model: nn.Module
    optimizer: Optimizer
    batch: Any


@contextmanager
def twin(model: nn.Module, optimizer: Optimizer, batch: Any) -> Iterator[Twin]:
    """Inside the block fake tensors rule; the twins can be wrapped, run and thrown away.

    Args:
        model: Real or fake; not changed.
        optimizer: Its optimizer; not changed. States that it has are copied as fake ones.
        batch: Tensors in any nesting.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode, one_sequence_per_row(arguments(batch)[1]):
        leaves = (x for x in tree_leaves(batch) if isinstance(x, Tensor))
        for x in (*_tensors(model, optimizer), *leaves):
            if id(x) not in memo:
                memo[id(x)] = _fake(x)
        yield Twin(
            copy.deepcopy(model, memo),
            copied(optimizer, memo),
            tree_map_only(Tensor, lambda x: memo[id(x)], batch),
        )


def copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A deep copy, with what a subclass holds besides groups and states (which torch leaves out).

    Args:
        optimizer: Not changed.
        memo: As for `copy.deepcopy`: id of a parameter -> what stands for it in the copy.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> copied(torch.optim.LBFGS([weight]), {id(weight): weight})._params[0] is weight
        True
    """
    new = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(new) and name != "step":  # a scheduler's, bound to the original
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """Every tensor that a copy would allocate."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        internal = ("_parameters", "_buffers", "_modules")
        own = {name: value for name, value in vars(module).items() if name not in internal}
        yield from (x for x in tree_leaves(own) if isinstance(x, Tensor))
    for state in optimizer.state.values():
        yield from (x for x in tree_leaves(state) if isinstance(x, Tensor))


def _fake(x: Tensor) -> Tensor:
    """A fake tensor like `x`, on the CPU: fake CUDA tensors need a CUDA build of torch."""
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, nn.Parameter):
        return nn.Parameter(fake, x.requires_grad)
    return fake.requires_grad_(x.requires_grad)

"""Which runs of identical blocks a forward also calls alike, so that three of them stand for all.

What is around a block decides what it saves, too: some blocks of a loop may be checkpointed, given
another argument, or followed by a norm whose result is returned. So a fake copy runs once with all
blocks, and once with three blocks of each run. From the third on a block is a stub that returns
tensors like the second one's. Each call is recorded with the source lines that lead to it, the
state of autograd, the arguments, and the ops up to the next call.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.activations.trace.fake_copies import fake_copies
from memtrain.activations.trace.repeats import (
    RepeatedBlocks,
    refined,
    repeated_blocks,
    shortened,
    shown,
)

_Signatures = Mapping[str, Any]


def foldable_blocks(model: nn.Module, batch: Any) -> list[RepeatedBlocks]:
    """Find the runs of identical blocks that a forward calls in the same way.

    Args:
        model: Real or fake; not changed.
        batch: What the model is called with.

    Returns:
        Runs of more than `repeats.KEPT` blocks. Each block left out is called once, as the second
        is; the kept ones are called alike with and without the others. No runs for a model whose
        forward fails here.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> model = nn.Sequential(*(block() for _ in range(6)))
        >>> [len(run.paths) for run in foldable_blocks(model, torch.ones(1, 4))]
        [6]
    """
    runs = repeated_blocks(model)
    if not runs:
        return []
    # The model's own errors are reported by the forward that runs all blocks.
    with suppress(Exception):
        calls = _calls(model, batch, runs, whole=True)
        runs = [part for run in runs for part in _called_alike(run, calls)]
        short = _calls(model, batch, runs, whole=False) if runs else {}
        return [run for run in runs if all(calls[path] == short[path] for path in run.kept)]
    return []


def _called_alike(run: RepeatedBlocks, calls: _Signatures) -> list[RepeatedBlocks]:
    """Split a run by calls; the first and the last block of a part are run, whatever they do."""
    if any(len(calls[path]) != 1 for path in run.paths):
        return []
    first, *inner, last = run.paths
    classes = {path: calls[path] for path in inner}
    classes |= {first: classes[inner[0]], last: classes[inner[-1]]}
    return refined([run], classes.__getitem__)


def _calls(
    model: nn.Module, batch: Any, runs: Sequence[RepeatedBlocks], *, whole: bool
) -> _Signatures:
    """Path of each block -> a signature of each of its calls."""
    with fake_copies(model, None, batch) as (copy, _, fake), torch.enable_grad(), _Log() as log:
        for run in runs:
            _Stubs(copy, run, log)
        args, kwargs = call_arguments(fake)
        with shortened(copy, [] if whole else runs):
            copy(*args, **kwargs)
    return log.calls


class _Log(TorchDispatchMode):
    """The calls of blocks, and the ops outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[list[Any]]] = {}
        self._ops: list[Any] = []  # since the last call
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._depth:
            self._ops.append((func, [shown(x) for x in tree_leaves(result)]))
        return result

    def enter(self, path: str, given: Any) -> None:
        """Note a call of a block."""
        self._ops = []
        call = [_lines(), _state(), [shown(x) for x in tree_leaves(given)], self._ops]
        self.calls.setdefault(path, []).append(call)
        self._depth += 1

    def leave(self) -> None:
        """Note that the call has ended."""
        self._depth -= 1


class _Stubs:
    """Blocks of a run, of which the first two run and the others return what the second does."""

    def __init__(self, model: nn.Module, run: RepeatedBlocks, log: _Log) -> None:
        self.log, self.second, self.result = log, run.kept[1], None
        for number, path in enumerate(run.paths):
            block = model.get_submodule(path)
            own = block.forward if number < 2 else None
            vars(block)["forward"] = partial(self._call, path, own)

    def _call(self, path: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        self.log.enter(path, (args, kwargs))
        try:
            result = self._like() if own is None else own(*args, **kwargs)
        finally:
            self.log.leave()
        if path == self.second:
            self.result = result
        return result

    def _like(self) -> Any:
        return tree_map_only(Tensor, _another, self.result)


def _another(x: Tensor) -> Tensor:
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return y.requires_grad_().clone() if x.requires_grad else y


def _lines() -> list[Any]:
    """The instructions that are being executed, from the block's call up to the root's.

    Without those of `nn.Module` itself, which depend on whether there are hooks.
    """
    found: list[Any] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _calls.__code__:
        if frame.f_globals is not vars(nn.modules.module):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _state() -> tuple[Any, ...]:
    """Whether tensors are saved, by whose hooks, and under which autocast."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    hooks = autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else getattr(hooks[0], "__code__", type(hooks[0]))
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), pack, *autocast

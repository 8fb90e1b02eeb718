"""Modules that keep their inputs only, and run again in the backward: activation checkpointing."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

from memtrain.activations.intercept.compiler_internals import sync_hook_order
from memtrain.activations.saved.fit import fit
from memtrain.activations.saved.flatten import memory_of
from memtrain.activations.saved.handles import Kept
from memtrain.activations.saved.known_ops import LINEAR
from memtrain.activations.saved.origin import in_transform, is_parameter, unsupported
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import CHECKPOINT_INPUT, RECOMPUTE, Site
from memtrain.compressors import Compressor, Keep

BLOCKS = "@blocks"
NO_BLOCKS = f"{BLOCKS}: the model repeats no module with children in a ModuleList or Sequential"
"""Text of a plan where that matches nothing."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward
_OVERLAPS = 1
"""Of an expanded buffer, which torch does not write to."""
_TORCH = (True, noop_context_fn, "default", False, True)  # its own defaults


def recomputed(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the paths of the modules to recompute: of nested ones the outermost.

    Patterns are globs over paths as in `named_modules()`; `@blocks` stands for `blocks_of(model)`,
    which may be none.

    Example:
        >>> model = nn.ModuleDict({"h": nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Tanh()])})
        >>> recomputed(model, ["h*"])
        ['h.0', 'h.1']
    """
    found: list[str] = []
    modules = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, (*_CONTAINERS, torch.jit.ScriptModule))
    }
    if BLOCKS in patterns:
        blocks = [escape(name) for name in blocks_of(model) if name in modules]
        patterns = [*(p for p in patterns if p != BLOCKS), *blocks]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(
                f"activations.recompute={pattern!r} matches no module that can be run again; "
                "allowed: paths as in named_modules(), not of a ModuleList or a scripted module"
            )
    for name in modules:
        above = [outer for outer in found if name.startswith(f"{outer}.") or not outer]
        if not above and any(fnmatchcase(name, pattern) for pattern in patterns):
            found.append(name)
    return found


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of the modules that a model repeats, for activation checkpointing.

    They are the children with children and parameters of `ModuleList`s and `Sequential`s, outermost
    first; of lists within lists, those of the longest.

    Example:
        >>> layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> blocks_of(nn.ModuleDict({"h": nn.ModuleList([layer, layer])}))
        ['h.0']
        >>> blocks_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        []
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []
    for module, name in names.items():
        if any(f"{name}.".startswith(f"{path}.") for path in found):
            continue
        parts = _parts(module)
        found += [names[part] for part in parts if len(_parts(part)) <= len(parts)]
    return found


def _parts(module: nn.Module) -> list[nn.Module]:
    """Of a list of two modules or more, those that have children and parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return []
    return [child for child in module.children() if [*child.children()] and [*child.parameters()]]


class Recompute:
    """Puts torch's own non-reentrant checkpointing around modules, by hooks.

    The gradients are those of plain training to the last bit: the random stream and autocast are
    as they were, buffers (running statistics) are updated once, and no cache of keys and values is
    filled. It is inactive where nothing is saved (`no_grad`), where such a cache has entries
    already (a prefix), inside `torch.compile` and transforms of `torch.func`.

    Inputs are kept, or stored by the compressor `inputs`. `rerun` runs a module's forward again,
    given its path, itself, its arguments and keyword arguments. It is inactive while `suspended`.

    Memory:
        The inputs of each module; while its backward runs, all that it saves, and a copy of its
        buffers while it runs again.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Sequence[str],
        saved: SavedTensors,
        inputs: Compressor | Keep,
        rerun: Callable[[str, nn.Module, Any, Any], Any],
        suspended: Callable[[], bool],
    ) -> None:
        self.names = recomputed(model, patterns)
        """Paths of the modules."""
        self.saved, self.inputs, self.rerun, self.suspended = saved, inputs, rerun, suspended
        self._handles: list[Any] = []
        self._running: dict[int, list[tuple[nn.Module, ExitStack]]] = {}
        self.called: set[str] = set()
        """Paths of the modules that were called outside of graphs of torch.compile."""

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_running": {}}

    def attach(self, model: nn.Module) -> None:
        """Register the hooks inside of existing ones: last before, first after the forward."""
        for name in self.names:
            module = model.get_submodule(name)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
            sync_hook_order(module._forward_hooks)

    def detach(self) -> None:
        """Remove the hooks; existing graphs still recompute."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def break_off(self) -> None:
        """Close the modules whose forward was interrupted before their hooks ran."""
        for _, contexts in reversed(self._running.pop(threading.get_ident(), [])):
            contexts.close()

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return None
        self.called.add(name)
        stack = self._running.setdefault(threading.get_ident(), [])
        call = None if self._inactive() else without_caches(module, args, kwargs)
        if call is None:
            stack.append((module, ExitStack()))
            return None
        args, kwargs = call
        leaves, spec = tree_flatten((args, kwargs))
        kept: dict[int, Any] = {}  # a tensor that is given twice is one tensor again
        with torch._C.DisableTorchFunction():
            for leaf in leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in kept:
                    role = f"input{len(kept) or ''}"
                    wanted = self.inputs if leaf.requires_grad else CHECKPOINT_INPUT
                    handle = _handle(self.saved, Site(name, RECOMPUTE, role), leaf, wanted)
                    kept[id(leaf)] = handle or Kept(leaf, leaf.detach()), leaf.requires_grad
        positions = [id(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        del leaves, args, kwargs

        def rerun_forward() -> None:
            found = {
                position: one.unpack().detach().requires_grad_(requires_grad)
                for position, (one, requires_grad) in kept.items()
            }
            inputs = [
                other if position is None else found[position]
                for position, other in zip(positions, others, strict=True)
            ]
            args, kwargs = tree_unflatten(inputs, spec)
            with buffers_restored(module):  # the first forward has changed them
                self.rerun(name, module, args, kwargs)

        generator = _checkpoint_without_reentrant_generator(rerun_forward, *_TORCH)
        with torch._C.DisableTorchFunction():  # its ops are not the model's
            next(generator)
        contexts = ExitStack()
        contexts.callback(next, generator, None)  # takes its saved-tensor hooks off
        stack.append((module, contexts))
        return call

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._running.get(threading.get_ident(), [])
        if not stack or stack[-1][0] is not module:
            return
        _, contexts = stack.pop()
        if not stack:
            del self._running[threading.get_ident()]
        contexts.close()
        self.saved.skip()  # what the first run saved is dropped

    def _inactive(self) -> bool:
        return (
            not torch.is_grad_enabled()
            or torch.jit.is_tracing()
            or in_transform()
            or self.suspended()
        )


def _handle(saved: SavedTensors, site: Site, x: Tensor, chosen: Compressor | Keep) -> Any:
    """Return the handle of an input; None where it is kept."""
    if unsupported(x):
        return None
    if isinstance(chosen, Compressor):
        chosen = fit(chosen, LINEAR, x.dtype, None)
    kept = saved.is_small(x) or memory_of(x)[1] is None or saved.is_kept(x) or is_parameter(x)
    if isinstance(chosen, Keep) or kept or not (handle := saved.compress(x, site, chosen)):
        saved.keep(x, site, CHECKPOINT_INPUT.reason)
        return None
    return handle if saved.checks is None else saved.checks.around(handle, x, site, chosen)


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Undo what the block does to the buffers of a module and its submodules.

    Memory:
        A copy of the buffers.
    """
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in before:
            if torch._debug_has_internal_overlap(buffer) != _OVERLAPS:
                buffer.data.copy_(value)  # no new version: the block may have saved it
            owner._buffers[name] = buffer


def is_cache(x: object) -> bool:
    """Return whether an object is a cache of Hugging Face Transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(x, module.Cache)


def without_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with None in place of caches, which training does not read.

    Hugging Face's own activation checkpointing does so too. A module that reads the entries of
    another keeps its cache (`_can_checkpoint_with_cache`). Returns None if a cache has entries for
    the module from before (a prefix).
    """
    caches = [x for x in (*args, *kwargs.values()) if is_cache(x)]
    if not caches or getattr(module, "_can_checkpoint_with_cache", False):
        return args, dict(kwargs)
    numbers = {getattr(part, "layer_idx", None) for part in module.modules()}
    layers = [n for n in numbers if isinstance(n, int)] or [0]
    if any(cache.get_seq_length(layer) > 0 for cache in caches for layer in layers):
        return None
    without = {name: None if is_cache(x) else x for name, x in kwargs.items()}
    if "use_cache" in without:
        without["use_cache"] = False
    return tuple(None if is_cache(x) else x for x in args), without

"""Sees every op of a model's forward, and acts on what it saves: replaces it, or hooks it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from memtrain.activations import replace
from memtrain.activations.replace import COMPOSITES, Nonlinearity
from memtrain.activations.saved import Choose, Compressed, Kept, SavedTensors, unpack
from memtrain.activations.sites import Op, Record, Site, storage_id
from memtrain.compressors import DerivativeCode, Identity


class _Mode(TorchFunctionMode):
    """Hands every torch function that runs inside the forward to the interception."""

    def __init__(self, interception: "Interception") -> None:
        super().__init__()
        self.interception = interception

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # x.shape and its like: nothing to save
            return func(*args, **(kwargs or {}))
        return self.interception.run(func, name, args, kwargs or {})


class Interception:
    """Compresses what a model's forward saves for backward; the model's code is not touched.

    Hooks on every module (never a replaced `forward`, so that deepcopy and pickle work) turn a
    `TorchFunctionMode` and saved-tensor hooks on around the outermost forward, and keep the path
    of the module that runs now. It stays out under `no_grad`, inside `torch.compile` and inside
    activation checkpointing (whose saved tensors are recomputed, not kept).

    Args:
        model: The module whose forward is intercepted.
        choose: Site -> compressor, or the reason to keep the tensor.
        min_elements: Smaller tensors are kept.
        seed: Feeds the keys of stochastic rounding.
        settle: Told what the first whole forward saved.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Choose,
        *,
        min_elements: int,
        seed: int,
        settle: Callable[[list[Record]], None],
    ) -> None:
        self.model, self.settle = model, settle
        self.saved = SavedTensors(choose, min_elements, seed)
        self.saved.records = []
        self._handles: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._path: list[tuple[str, Nonlinearity | None]] = []
        self._op: Op | None = None
        self._outer: tuple[saved_tensors_hooks, _Mode] | None = None
        self._depth = 0  # of the path when the interception was turned on

    def __getstate__(self) -> dict[str, object]:
        runtime = ("_path", "_op", "_outer", "_depth")
        return {name: value for name, value in vars(self).items() if name not in runtime}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._clear()

    def attach(self) -> None:
        """Put the hooks on the model's modules."""
        for name, module in self.model.named_modules():
            composite = COMPOSITES.get(type(module).__name__, "")
            before = partial(self._before, name, composite)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]

    def detach(self) -> None:
        """Take the hooks off again; payloads in living graphs stay valid."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- around modules ---------------------------------------------------------------------

    def _before(
        self,
        name: str,
        composite: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._path and module is self.model:  # Ctrl-C broke an earlier forward off
            self._stop(whole=False)
            self._path.clear()
        call = None
        if self._outer is None and self._may_start():
            self._start(_tensors(args, kwargs))
        elif self._outer is not None and composite and len(args) == 1:
            call = Nonlinearity(composite, args[0], inplace=False)
            call = call if self._code(name, call) else None
        self._path.append((name, call))
        # The composite then runs on no elements; `_after` returns the real result.
        return None if call is None else ((call.x.detach().new_empty(0),), kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._path:  # the hooks were put on during this very forward
            return None
        name, call = self._path.pop()
        result = None
        if call is not None and output is not None:
            code = self._code(name, call)
            result = code and self._replaced(Op(name, call.function, (call.x,)), call, code)
        if self._outer is not None and len(self._path) == self._depth:
            self._stop(whole=output is not None)
        return result

    def _may_start(self) -> bool:
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and _top_hooks() is None  # someone else's: activation checkpointing, save_on_cpu
        )

    def _start(self, inputs: Sequence[Tensor]) -> None:
        own = [*self.model.parameters(), *self.model.buffers()]
        self.saved.begin({storage_id(x) for x in own}, {storage_id(x) for x in inputs})
        self._depth = len(self._path)
        hooks, mode = saved_tensors_hooks(self._pack, unpack), _Mode(self)
        hooks.__enter__()
        mode.__enter__()
        self._outer = (hooks, mode)

    def _stop(self, *, whole: bool) -> None:
        if self._outer is None:
            return
        hooks, mode = self._outer
        self._outer = self._op = None
        mode.__exit__(None, None, None)
        hooks.__exit__(None, None, None)
        self.saved.end()
        if self.saved.records is not None:
            records, self.saved.records = self.saved.records, None if whole else []
            if whole:
                self.settle(records)

    # -- around ops -------------------------------------------------------------------------

    def run(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one torch function: replaced, or as it is with its saved tensors packed."""
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        module = self._path[-1][0] if self._path else ""
        call = replace.nonlinearity(name, args, kwargs)
        if call is not None:
            code = self._code(module, call)
            if code is not None:
                return self._replaced(Op(module, call.function, (call.x,)), call, code)
            name = call.function
        elif name == "dropout":
            result = self._dropout(module, *args, **kwargs)
            if result is not None:
                return result
        outer, self._op = self._op, Op(module, name.strip("_"), _tensors(args, kwargs))
        try:
            return func(*args, **kwargs)
        finally:
            self._op = outer

    def _pack(self, x: Tensor) -> Kept | Compressed:
        module = self._path[-1][0] if self._path else ""
        return self.saved.pack(x, self._op or Op(module, "autograd.Function"))

    def _code(self, module: str, call: Nonlinearity) -> DerivativeCode | None:
        """The derivative code for a call of a nonlinearity, or None to run it as it is."""
        if not self._replaceable(call.x):
            return None
        chosen = self.saved.choose(Site(module, call.function, "input"))
        return chosen if isinstance(chosen, DerivativeCode) else None

    def _replaceable(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and x.requires_grad
            and torch.is_grad_enabled()
            and x.is_floating_point()
            and x.numel() >= self.saved.min_elements
            and _top_hooks() == self._pack  # not inside someone's activation checkpointing
        )

    def _replaced(self, op: Op, call: Nonlinearity, code: DerivativeCode) -> Tensor:
        outer, self._op = self._op, op._replace(replaced=True)
        try:
            return replace.apply_nonlinearity(call, code)
        finally:
            self._op = outer

    def _dropout(
        self, module: str, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        if not training or inplace or not 0 < p < 1 or not self._replaceable(x):
            return None
        if isinstance(self.saved.choose(Site(module, "dropout", "saved")), str | Identity):
            return None
        outer, self._op = self._op, Op(module, "dropout", (x,), replaced=True)
        try:
            return replace.dropout(x, p)
        finally:
            self._op = outer


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors among a function's arguments, one level of lists included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return tuple(found)


def _top_hooks() -> Any:
    """The pack function on top of autograd's stack of saved-tensor hooks, or None."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
    return None if top is None else top[0]

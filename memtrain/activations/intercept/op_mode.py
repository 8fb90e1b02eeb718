"""The torch function mode of a forward: it replaces ops, and visits the nodes that they make."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from memtrain.activations.intercept.reentrancy import top_hooks, top_pair
from memtrain.activations.intercept.replaced_ops import Replacements
from memtrain.activations.saved.aliases import callables
from memtrain.activations.saved.known_ops import ATTENTION, UNSCALED_ATTENTION, WIDE, WIDE_ATTENTION
from memtrain.activations.saved.origin import storage_id, unsupported
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import OTHER_HOOKS, Site
from memtrain.activations.saved.store import is_unwritten, mark_unwritten, storage_of

_EXPOSING = (
    Tensor.data.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.data.__set__,  # pyright: ignore[reportAttributeAccessIssue]
    *callables("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "set_"),
    *callables("_typed_storage", "share_memory_"),
)
EXPOSING = frozenset(_EXPOSING)
"""Functions that expose a tensor's memory: later writes may not increase its version."""
_ADDRESS = callables("data_ptr", "record_stream")
_READS = callables(
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm"),
    *("einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "scaled_dot_product_attention"),
)
"""Functions whose kernels may read their arguments by addresses that allow writes, as cuDNN's and
bmm's in bfloat16 do, and do not write: the marks of `mark_unwritten` stay."""
_ATTENTIONS = callables("scaled_dot_product_attention")
_BACKWARDS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
INSIDE = (
    "the forward computes a gradient of ops whose saved tensors memtrain compresses: it is "
    "approximate, and so is what the model makes of it, also in evaluation. Keep these tensors by "
    "activations.exceptions, or wrap with the preset optimizer_only"
)
_TORCH_LIBRARIES = ("aten", "prim", "prims")
_GETTER = type(Tensor.shape.__get__)  # pyright: ignore[reportAttributeAccessIssue]
_QUERIES = callables("size", "stride", "dim", "numel", "is_floating_point", "__len__")


class OpMode(TorchFunctionMode):
    """Runs each torch function of a forward, and then visits the nodes that it has made.

    Without replacements, another mode beneath this one runs the functions; without `saved`, another
    mode above visits the nodes.
    """

    def __init__(self, replacements: Replacements | None, saved: SavedTensors | None) -> None:
        super().__init__()
        self.replacements, self.saved = replacements, saved
        self._run = _run if replacements is None else replacements.run
        if replacements is not None and replacements.saved.options.low is not None:
            self._run = replacements.run_mixed
        self.module = ""
        """Path of the module whose forward runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        saved = self.saved
        if type(func) is _GETTER or func in _QUERIES:
            if saved is not None and func in EXPOSING:
                _expose(saved, args[0])
            return func(*args, **kwargs)
        hooked = saved is not None and self._before(saved, func, args, kwargs)
        marked: list[tuple[Tensor, int]] = []
        for x in args if saved is not None and func in _READS else ():
            if isinstance(x, Tensor) and not unsupported(x) and is_unwritten(x):
                marked.append((x, x._version))
        result = self._run(func, args, kwargs)
        for x, version in marked:
            if x._version == version:
                mark_unwritten(x)
        if saved is not None:
            # An assignment to a slice returns nothing: its nodes are those of its first argument.
            made = args[0] if result is None and args else result
            saved.collect(made, func, self.module, hooked=hooked)
        return result

    def _before(self, saved: SavedTensors, func: Any, args: Sequence[Any], kwargs: Any) -> bool:
        """Note what the visit of a function's nodes needs to know of its call.

        Returns whether memtrain may not pack what the function saves.
        """
        hooks = top_pair(True)
        if hooks is not None or saved.hooked:
            self._note_hooks(saved)
        saved.bool_mask, saved.attention = False, ""
        saved.derived.arguments = (*args, *kwargs.values()) if kwargs else args
        saved.derived.first = _get_sequence_nr()
        if func in _ATTENTIONS:
            _note_attention(saved, args, kwargs)
        elif func in EXPOSING:
            _expose(saved, args[0])
        elif func in _ADDRESS:
            _wrote(saved, args[0])
        elif (
            isinstance(func, OpOverload | OpOverloadPacket)
            and _library(func) not in _TORCH_LIBRARIES
        ):
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor):
                    _wrote(saved, x)
            saved.derived.arguments = ()  # what such an op casts, it may also write
        elif func in _BACKWARDS:
            saved.readers.keep_all()  # the backward may free what waits
            if saved.is_lossy:
                warnings.warn(INSIDE, RuntimeWarning, stacklevel=5)
            return True
        return hooks is not None

    def _note_hooks(self, saved: SavedTensors) -> None:
        hooks = top_hooks()
        checkpoint = getattr(hooks, "__module__", "") == torch.utils.checkpoint.__name__
        if saved.under_hooks(hooks is not None) and not checkpoint and saved.records is not None:
            saved.records.note(Site(self.module, "*", "*"), OTHER_HOOKS)


def modes_of(replacements: Replacements, saved: SavedTensors | None, rounding: Any) -> list[Any]:
    """Return the modes in the order in which to enter them: the last one handles each op first."""
    if rounding is None:
        return [OpMode(replacements, saved)]
    modes: list[Any] = [OpMode(replacements, None), rounding]
    return modes if saved is None else [*modes, OpMode(None, saved)]


def _run(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _expose(saved: SavedTensors, x: Tensor) -> None:
    """Keep a tensor whose memory was exposed: later writes may bypass the version counter."""
    if not unsupported(x) and (number := storage_id(x)) not in saved.parameters:
        storage_of(saved.store, x, number).keep(x.detach())


def _wrote(saved: SavedTensors, x: Tensor) -> None:
    """Invalidate cached payloads of a storage whose address was read, and may be written."""
    if not unsupported(x) and (storage := saved.store.get(storage_id(x))) is not None:
        storage.epoch += 1
        if type(x) is not FakeTensor:
            x.untyped_storage().data_ptr()  # removes the mark of `mark_unwritten`


def _note_attention(saved: SavedTensors, args: Sequence[Any], kwargs: Any) -> None:
    scale = kwargs.get("scale")
    saved.attention = ATTENTION
    if isinstance(scale, int | float) and scale >= 1:
        query = args[0] if args else kwargs.get("query")
        wide = isinstance(query, Tensor) and query.shape[-1] >= WIDE
        saved.attention = WIDE_ATTENTION if wide else UNSCALED_ATTENTION
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    saved.bool_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool


def _library(op: OpOverload | OpOverloadPacket) -> str:
    name: Any = getattr(op, "namespace", "") or getattr(op, "_qualified_op_name", "")
    return str(name).split("::")[0]

"""Ops that are replaced whole, by the torch function that is called."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.compiler import is_compiling
from torch.nn import functional
from torch.overrides import (
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)

from memtrain.activations.intercept.mixed_dtypes import run_mixed
from memtrain.activations.intercept.reentrancy import top_hooks
from memtrain.activations.ops import cross_entropy, dropout, fewbit, nonlinear, pool
from memtrain.activations.ops import norm_calls as norms
from memtrain.activations.ops.call import Call
from memtrain.activations.ops.method_sources import defined
from memtrain.activations.saved import known_ops
from memtrain.activations.saved.aliases import callables
from memtrain.activations.saved.handles import Kept
from memtrain.activations.saved.known_ops import SavedBy
from memtrain.activations.saved.node_tensors import hook
from memtrain.activations.saved.options import PRODUCTS
from memtrain.activations.saved.origin import in_transform, is_parameter, storage_id, unsupported
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.activations.saved.site import UNKNOWN_READER, Site
from memtrain.activations.saved.store import is_unwritten, mark_unwritten, storage_of
from memtrain.compressors import Compressor, Keep
from memtrain.compressors.fewbit.register import Registered

Recognise = Callable[[str, Sequence[Any], Mapping[str, Any]], Call | None]
Recogniser = Callable[[nn.Module, Tensor], Call | None]

_REPLACING: Counter[type[nn.Module]] = Counter()
"""Class -> how many interceptions use its replaced forward."""

# torch's own form of these saves its result, not its input.
_SAVE_RESULTS = ("relu", "sigmoid", "tanh")

_INPUT = SavedBy("0", "input", known_ops.DERIVATIVE, readers=known_ops.FACTOR_READERS)


def _is_aten(function: Any) -> bool:
    return isinstance(function, OpOverload | OpOverloadPacket)


def _replaced() -> Iterator[tuple[Any, tuple[Recognise, str]]]:
    for name in nonlinear.NAMES:
        for name_or_in_place in (name, f"{name}_"):
            for function in callables(name_or_in_place):
                yield function, (nonlinear.recognise, name_or_in_place)
    # Of other ops only torch's public functions, whose order of arguments the recognisers know.
    public: dict[Recognise, tuple[str, ...]] = {
        norms.recognise: ("layer_norm", "group_norm", "rms_norm"),
        dropout.recognise: ("dropout",),
        pool.recognise: pool.NAMES,
    }
    for recognise, names in public.items():
        for name in names:
            for function in callables(name):
                if not _is_aten(function):
                    yield function, (recognise, name)
    yield functional.batch_norm, (norms.recognise, "batch_norm")
    yield functional.instance_norm, (norms.recognise, "instance_norm")
    yield functional.cross_entropy, (cross_entropy.recognise, "cross_entropy")
    yield run_as_one_op, (_recognise_one_op, "")


def _recognise_one_op(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    recognise, _, module, x = args
    return recognise(module, x)


def recogniser(cls: type[nn.Module]) -> Recogniser | None:
    """Return what makes a `Call` of a module of a class that writes one op (such as GELU) out.

    The class is known by the source of its forward; None for any other.
    """
    if (op := nonlinear.op_of(cls)) is not None:
        return partial(nonlinear.recognise_module, op)
    if (variant := norms.variant_of(cls)) is not None:
        return partial(norms.recognise_module, variant)
    return None


def replace_forward(cls: type[nn.Module]) -> bool:
    """Let the forward of a class that writes one op out run as one call, where a rule matches.

    The new forward belongs to the class, so that torch.compile uses one graph for equal modules.
    It runs the original one wherever no `OpMode` is active. `restore_forward` takes it back.

    Returns:
        Whether the class writes one op out.
    """
    recognise, original = recogniser(cls), vars(cls).get("forward")
    if recognise is None or original is None:
        return False
    _REPLACING[cls] += 1
    if hasattr(original, "original"):
        return True

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_one_op = type(self) is cls and len(args) == 1 and not kwargs and not is_compiling()
        if is_one_op and _takes(recognise, self, args[0]):
            return run_as_one_op(recognise, original, self, args[0])
        return original(self, *args, **kwargs)

    forward.original = original  # pyright: ignore[reportAttributeAccessIssue]
    cls.forward = forward
    return True


def restore_forward(cls: type[nn.Module]) -> None:
    """Undo a `replace_forward`; the last one restores the forward of the class."""
    _REPLACING[cls] -= 1
    original = defined(cls, "forward")
    if not _REPLACING[cls] and vars(cls).get("forward") is not original:
        cls.forward = original


def run_as_one_op(recognise: Recogniser, original: Any, module: nn.Module, x: Tensor) -> Any:
    """Run the original forward of a module as one torch function, which modes see."""
    if has_torch_function_unary(x):
        return handle_torch_function(run_as_one_op, (x,), recognise, original, module, x)
    return original(module, x)


def _takes(recognise: Recogniser, module: nn.Module, x: Any) -> bool:
    """Return whether the active `OpMode` replaces this module's forward by one op."""
    for mode in _get_current_function_mode_stack():
        replacements = getattr(mode, "replacements", None)
        if isinstance(replacements, Replacements) and isinstance(x, Tensor):
            with torch._C.DisableTorchFunction():
                return replacements.takes(recognise, module, x)
    return False


class Replacements:
    """Runs torch functions: replaced by ops that save payloads, or as they are."""

    def __init__(self, saved: SavedTensors) -> None:
        self.saved = saved
        self.module = ""
        """Path of the module whose forward runs."""
        self.idle = False
        """Whether nothing is saved for a backward."""

    def run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a torch function."""
        is_known = function in REPLACED or type(function) is Registered
        if is_known and not self.idle and is_grad_enabled():
            call = self._recognise(function, args, kwargs)
            chosen = None if call is None else self.compressor(call)
            if call is not None and chosen is not None:
                if call.accepts(chosen):
                    return self._replace(call, chosen, function, args, kwargs)
                if function is run_as_one_op and call.plain is not None:
                    return call.plain(call.x)
        return function(*args, **kwargs)

    def run_mixed(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a torch function of a model whose weights take two bytes."""
        low: Any = self.saved.options.low
        return run_mixed(partial(self.run, function), low, function, self.module, args, kwargs)

    def takes(self, recognise: Recogniser, module: nn.Module, x: Tensor) -> bool:
        """Return whether a module that writes an op out runs as one op."""
        if self.idle or not is_grad_enabled():
            return False
        call = recognise(module, x)
        chosen = None if call is None else self.compressor(call)
        if call is None or chosen is None:
            return False
        codes = chosen.gives_derivative or chosen.is_identity
        return call.accepts(chosen) or (call.plain is not None and not codes)

    def _recognise(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call | None:
        known = REPLACED.get(function)
        if known is not None:
            recognise, name = known
            try:
                return recognise(name, args, kwargs)
            except (TypeError, KeyError, IndexError):  # arguments that torch reports as wrong
                return None
        if type(function) is Registered:
            return nonlinear.recognise_registered(function, args)
        return None

    def compressor(self, call: Call) -> Compressor | None:
        """Return the rules' compressor for a call's site, or None where it runs as it is."""
        x = call.x
        if not x.requires_grad or not x.is_floating_point() or self.saved.is_small(x):
            return None
        # Inside someone's activation checkpointing, or forward-mode differentiation.
        if unsupported(x) or top_hooks() is not None or in_transform():
            return None
        if call.tensor == "input" and call.op not in _SAVE_RESULTS and self.saved.is_kept(x):
            return None  # what torch's own form saves is there
        chosen = self.saved.choose(Site(self.module, call.op, call.tensor))
        return None if isinstance(chosen, Keep) else chosen

    def _replace(
        self,
        call: Call,
        compressor: Compressor,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run memtrain's autograd Function for this call, which saves a payload."""
        site = Site(self.module, call.op, call.tensor)
        checks, key = self.saved.checks, self.saved.key(site)
        run = partial(call.waits or call.run, compressor, key)
        unwritten, version = is_unwritten(call.x), call.x._version
        y = run() if checks is None else checks.replaced(site, function, args, kwargs, run)
        if unwritten and call.x._version == version:
            mark_unwritten(call.x)  # the op's kernels read it by its address
        self._note(site, call.x, y)
        return y

    def _note(self, site: Site, x: Tensor, result: Any) -> None:
        """Note an op that has saved a payload itself."""
        saved, y = self.saved, result if isinstance(result, Tensor) else result[0]
        nodes = _nodes_of(y)
        if not nodes or nodes[0]._sequence_nr() < saved.mark:  # of an earlier op
            return
        node = nodes[0]
        saved.readers.visit(node, elements=partial(norms.least_size, site.op, x.shape))
        waits = getattr(node, "waits", False)
        if waits:
            self._wait(node, site)
        for one in nodes[1:]:
            saved.readers.visit(one)
        saved.readers.seen((y,))
        saved.is_lossy = saved.is_lossy or site.tensor == "input" or site.op == "cross_entropy"
        if saved.options.derives and isinstance(result, Tensor):
            saved.derived.add(y, site.op)
            if saved.options.derives == PRODUCTS and site.op == "dropout":
                saved.derived.add_dropped(y, x)
        if saved.watch is not None:
            saved.watch.saved(site, x.detach(), node)
        for part in node.saved_tensors if saved.records is not None and not waits else ():
            if part is not None and not (
                storage_id(part) in saved.parameters or is_parameter(part)
            ):
                saved.record(part, site, part.untyped_storage().nbytes(), "payload")
        saved.skip()

    def _wait(self, node: Any, site: Site) -> None:
        """Encode the input of a nonlinearity when the readers of its result are known."""
        saved, (x,) = self.saved, node.saved_tensors
        handle, version = Kept(x, x.detach()), x._version
        hook(node, "0", handle)

        def save(compress: bool) -> None:
            if compress and x._version == version:  # else the backward raises
                handle.kept = codes = fewbit.encode(node, x)
                saved.record(codes, site, codes.nbytes, "payload", "", handle)
            else:
                saved.keep(x, site, UNKNOWN_READER)

        storage = storage_of(saved.store, x, storage_id(x))
        saved.readers.add(node, _INPUT, x, storage, save, saved.records)


def _nodes_of(y: Tensor) -> list[Any]:
    """Return the node of memtrain's autograd Function, and those of views and casts after it."""
    nodes: list[Any] = [y.grad_fn]
    while nodes[-1] is not None and type(nodes[-1]) not in known_ops.REPLACED_NODES:
        nodes.append(nodes[-1].next_functions[0][0] if nodes[-1].next_functions else None)
    return [] if nodes[-1] is None else nodes[::-1]


REPLACED: Mapping[Any, tuple[Recognise, str]] = dict(_replaced())
"""Torch function -> what recognises its calls, and the name of its form."""

"""Executes the ops of a forward: replaced, or as they are with their saved tensors packed."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, Protocol

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_map, tree_map_only

from memtrain.activations.intercept.compiler_internals import run_by_tracer
from memtrain.activations.intercept.index_bounds import BOUNDED, limit_of
from memtrain.activations.intercept.mixed_dtypes import run_mixed
from memtrain.activations.intercept.options import Options
from memtrain.activations.intercept.reentrancy import top_hooks, unhooked
from memtrain.activations.intercept.replaced_ops import SMOOTH, is_replaced, recognise
from memtrain.activations.ops.autograd import output_again
from memtrain.activations.ops.call import Call
from memtrain.activations.ops.dropout import dropout_again
from memtrain.activations.ops.in_rows import IN_ROWS, in_rows
from memtrain.activations.saved.expected import BETWEEN
from memtrain.activations.saved.fit import ATTENTION, attention
from memtrain.activations.saved.flatten import flatten, layout_of
from memtrain.activations.saved.origin import foreign, storage_id
from memtrain.activations.saved.pack_hook import Replaced, SavedTensors
from memtrain.activations.saved.site import Op, Site
from memtrain.compressors import Compressor, Keep

# Ops whose result has its input's elements, in another dtype or memory order (or is the input).
COPIES = ("to", "float", "half", "bfloat16", "double", "type", "contiguous", "reshape", "flatten")
# Queries and views, and sums, whose backward needs none of their tensors: they run as they are.
_SAVE_NOTHING = """
size stride storage_offset dim ndimension numel nelement element_size data_ptr untyped_storage
get_device is_contiguous is_floating_point is_complex is_neg is_conj is_same_size tolist item
__len__ __bool__ __hash__ __repr__ __format__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
eq ne lt le gt ge arange zeros ones empty full zeros_like ones_like empty_like full_like
new_empty new_zeros new_ones new_full new_tensor
view view_as transpose permute movedim swapaxes swapdims t unsqueeze squeeze expand expand_as
split chunk unbind narrow select unflatten detach
add sub __add__ __radd__ __sub__ __rsub__ neg __neg__ add_ sub_ __iadd__ __isub__
"""
SAVE_NOTHING = frozenset(_SAVE_NOTHING.split())
_HOLE = object()  # where an op's input goes when the op is run again
HIDDEN = (
    "tensors are rounded op by op, which torch.compile, jit.trace and torch.func's transforms "
    "hide; allowed there: precision.assignment=fp32"
)
"""Why a forward whose ops are to be rounded is refused."""


QUERY, VIEW, OP = range(3)
"""Kinds of torch functions: `x.shape` and its like save nothing, views and sums no tensor."""


@lru_cache(maxsize=4096)  # a model calls few
def _traits(func: Any) -> tuple[str, int]:
    """The `__name__` of a torch function, and what it may save."""
    name = getattr(func, "__name__", "")
    return name, QUERY if name == "__get__" else VIEW if name in SAVE_NOTHING else OP


class Rounding(Protocol):
    """Rounds, or records, the weights and results of a forward's ops: views and queries too."""

    def attach(self, saved: SavedTensors) -> None:
        """Take the `SavedTensors` that will pack what forwards save."""
        ...

    def begin(self, model: nn.Module, module: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin the outermost forward, of `module`; returns its arguments."""
        ...

    def arguments(
        self, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Begin a torch function of this `__name__`; returns its arguments."""
        ...

    def function(
        self, func: Any, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Function that runs in its place and saves the same tensors: mostly itself."""
        ...

    def result(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """End the function, an op of this name in sites; returns its result."""
        ...

    def end(self, output: Any, *, whole: bool) -> Any:
        """End the outermost forward; `whole` is False where an exception ended it."""
        ...


class Executor(TorchFunctionMode):
    """Executes every torch function of a forward as the plan says.

    Args:
        saved: Packs what is saved, and knows the plan's choices.
        options: How saved tensors are handled.
        rounding: What else is done to the ops, also where nothing is saved for backward.
    """

    def __init__(
        self, saved: SavedTensors, options: Options, rounding: Rounding | None = None
    ) -> None:
        super().__init__()
        self.saved, self.options, self.rounding = saved, options, rounding
        saved.defers = rounding is not None
        # Functions of no more `saves` than this are not ours to see.
        self._passed = VIEW if rounding is None and options.low is None else QUERY
        self.module = ""  # path of the module that runs now
        self.idle = False  # whether ops are rounded only, their saved tensors left alone
        self._one_op = False  # whether a module runs as one op
        self.in_rows = False
        """Whether gradients of weights may be made in pieces."""
        self.is_aside = False
        """Whether the stack of modes was left: ops are not watched."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Executor, (self.saved, self.options, self.rounding), {"in_rows": self.in_rows}

    def reset(self) -> None:
        """Forget the forward that has ended, and leave the stack of modes."""
        self.idle = self._one_op = False
        if not self.is_aside:
            self.__exit__(None, None, None)
        self.is_aside = False

    def step_aside(self) -> None:
        """Leave the stack of modes, where it is on top: what follows is not the model's code."""
        if not self.is_aside and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self.is_aside = True

    def step_back(self) -> None:
        """Undo `step_aside`."""
        if self.is_aside:
            self.is_aside = False
            self.__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():  # a compiled part of the forward that is being traced
            if self.rounding is not None:
                _refuse_traced()
            return func(*args, **kwargs)
        known = self.saved.replaced.get((self.module, func))
        if known is not None and not self.idle and is_grad_enabled():
            y = self._replace_again(known, args, kwargs)
            if y is not None:
                return y
        name, saves = _traits(func)
        if saves <= self._passed:
            return func(*args, **kwargs)
        if self.rounding is None or self._one_op:
            return self._run(func, name, args, kwargs)
        args, kwargs = self.rounding.arguments(self.module, name, args, kwargs)
        func = self.rounding.function(func, self.module, name, args, kwargs)
        result = self._run(func, name, args, kwargs)
        return self._rounded(_op_name(name, args), args, kwargs, result)

    def _rounded(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], y: Any) -> Any:
        if self.rounding is not None:
            y = self.rounding.result(self.module, op, args, kwargs, y)
        self.saved.pack_deferred()
        return y

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        low = self.options.low
        if low is None:
            return self._run_op(func, name, args, kwargs)
        return run_mixed(partial(self._run_op, func, name), low, (self.module, name), args, kwargs)

    def _run_op(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.in_rows and name in IN_ROWS:
            func = self._in_rows(func, args, kwargs)
        if self.idle or name in SAVE_NOTHING or not is_grad_enabled():
            return func(*args, **kwargs)
        if is_replaced(name):
            call = recognise(name, args, kwargs, self.options)
            if call is not None:
                chosen = self.compressor(call)
                if chosen is not None and call.accepts(chosen):
                    y = self.replace(call, chosen)
                    replays = self.saved.replays and self.options.low is None
                    if call.again is not None and replays:
                        form = _form(call.x, args, kwargs)
                        site = Site(self.module, call.op, call.tensor)
                        again = Replaced(form, call.again, chosen, site)
                        self.saved.replaced[self.module, func] = again
                    return y
                name = call.op
        name = _op_name(name, args)
        dropout = 0.0
        if name == ATTENTION:
            query = args[0] if args else kwargs["query"]
            name = attention(kwargs.get("scale"), query.shape[-1])
            dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        limit = limit_of(name, args, kwargs) if name in BOUNDED else None
        op = Op(self.module, name, (args, kwargs), limit=limit, dropout=dropout)
        return self._hook(op, func, args, kwargs)

    def _in_rows(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function's form whose weight's gradient may be made in pieces, or itself."""
        form = in_rows(func, args, kwargs)
        if form is func or top_hooks() != (None if self.idle else self.saved.hook):
            return func  # others' checkpointing tells saves by what torch's function saves
        self.saved.expectations.watch()
        return form

    def compressor(self, call: Call) -> Compressor | None:
        """The rules' compressor for the call's site, or None where nothing may be replaced."""
        if not self._replaceable(call.x):
            return None
        chosen = self.saved.choose(Site(self.module, call.op, call.tensor))
        return None if isinstance(chosen, Keep) else chosen

    def replace(self, call: Call, compressor: Compressor) -> Any:
        """The call's result, in the form that saves the compressor's payload."""
        self.saved.expectations.watch()
        op = Op(self.module, call.op, ((call.x,), {}), replaced=call.tensor)
        site = Site(self.module, call.op, call.tensor)
        key = self.saved.key(site)
        if self.saved.watch is not None:
            self.saved.watch.saved(site, call.x)
        if self.saved.records or self.saved.watch is not None or self.saved.hooks_all:
            y = self._during(op, call.run, compressor, key)
        else:  # what it saves is kept as it is
            y = unhooked(call.run, compressor, key)
        if self.saved.drops:  # there is nothing to compute it again from
            return y
        derives = self.options.derive_outputs and isinstance(y, Tensor)
        again = output_again(y) if derives else None
        if again is not None:
            self.saved.derive(y, again, op.name)
        if (
            op.name == "dropout"
            and self.options.derive_products
            and layout_of(y) == layout_of(call.x)
        ):
            self.saved.copied(y, call.x, dropout_again(y))
        return y

    def _replace_again(
        self, known: Replaced, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """As `replace`, of a call alike to one that was replaced before; None where it is not."""
        form, run, compressor, site = known
        x = args[0] if args else None
        if type(x) is not Tensor or foreign(x) or _form(x, args, kwargs) != form:
            return None
        if top_hooks() != self.saved.hook:
            return None
        self.saved.expectations.watch()
        key = self.saved.key(site)
        y = unhooked(run, *args, **kwargs, compressor=compressor, key=key)
        again = output_again(y) if self.options.derive_outputs else None
        if again is not None:
            self.saved.derive(y, again, site.op)
        return y

    def as_one_op(self, call: Call) -> Callable[[], Any] | None:
        """Function that runs a module which writes the op out as one op; None: run it as it is."""
        compressor = self.compressor(call)
        if compressor is None:
            return None
        if call.accepts(compressor):
            return self._one(call, partial(self.replace, call, compressor))
        plain = getattr(call, "plain", None)
        if plain is None or compressor.is_identity or compressor.gives_derivative:
            return None
        op = Op(self.module, call.op, ((call.x,), {}))
        return self._one(call, partial(self._hook, op, plain, (call.x,), {}))

    def _one(self, call: Call, run: Callable[[], Any]) -> Callable[[], Any]:
        """`run`, of which only the result is rounded."""
        if self.rounding is None:
            return run

        def rounded() -> Any:
            if self.rounding is not None:
                self.rounding.arguments(self.module, call.op, (call.x,), {})
            self._one_op = True
            try:
                y = run()
            finally:
                self._one_op = False
            return self._rounded(call.op, (call.x,), {}, y)

        return rounded

    def _hook(self, op: Op, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        saved = self.saved
        outer, saved.op = saved.op, op  # as `_during`: a call less for each op of a forward
        try:
            result = func(*args, **kwargs)
        finally:
            saved.op = outer
        if saved.watch is not None:
            saved.watch.after(op, result)
        if saved.drops:
            return result
        if op.name in SMOOTH and self.options.derive_outputs:
            self._derive(op, result, func, args, kwargs)
        if op.name == "mul" and self.options.derive_products:
            self._derive_product(op, result)
        if op.name in COPIES:
            self._copied(op, result, func, args, kwargs)
        return result

    def _during(self, op: Op, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function while `op` is the one that saves."""
        outer, self.saved.op = self.saved.op, op
        try:
            result = func(*args, **kwargs)
        finally:
            self.saved.op = outer
        if self.saved.watch is not None:
            self.saved.watch.after(op, result)
        return result

    def _derive(
        self, op: Op, y: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Let later saves of a nonlinearity's output be computed again from its input's payload."""
        (x,) = op.inputs if len(op.inputs) == 1 else (None,)
        if x is None or not isinstance(y, Tensor) or foreign(x) or storage_id(x) == storage_id(y):
            return
        source = self.saved.cache.source_of(x)
        if source is None or layout_of(x) != layout_of(y):
            return

        again, dtype = _again(func, args, kwargs), y.dtype
        self.saved.expectations.watch()
        # Autocast may have run it in float32, and is off in the backward.
        self.saved.derive(y, lambda: again(source().to(dtype)), op.name)

    def _derive_product(self, op: Op, y: Any) -> None:
        """Let later saves of a product be computed again from the payloads of both factors."""
        like = layout_of(y) if isinstance(y, Tensor) and not foreign(y) else None
        if like is None or len(op.inputs) != 2 or any(like.expanded):
            return
        if any(
            foreign(x) or layout_of(x) != like or storage_id(x) == storage_id(y) for x in op.inputs
        ):
            return
        first, second = map(self.saved.cache.source_of, op.inputs)
        if first is not None and second is not None:
            self.saved.expectations.watch()
            self.saved.derive(y, partial(_product, first, second), op.name)

    def _copied(
        self, op: Op, y: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Let later saves of a copy hold its source."""
        if isinstance(y, Tensor) and y._is_view():  # of its input's memory, or its input itself
            return
        inputs = op.inputs
        (x,) = inputs if len(inputs) == 1 else (None,)
        if (
            x is not None
            and x is not y
            and isinstance(y, Tensor)
            and not foreign(x)
            and not foreign(y)
            and storage_id(x) != storage_id(y)
            and (y.device, y.numel()) == (x.device, x.numel())
            and y.is_floating_point()
            and x.is_floating_point()
            and y.numel() >= self.options.min_elements
        ):
            self.saved.expectations.watch()
            self.saved.copied(y, x, _again(func, args, kwargs))

    def _replaceable(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and not foreign(x)
            and x.requires_grad
            and is_grad_enabled()
            and x.is_floating_point()
            and x.numel() >= self.options.min_elements
            and top_hooks() == self.saved.hook  # not inside someone's activation checkpointing
        )


BETWEEN.update(
    function.__code__
    for function in (Executor.__torch_function__, Executor._run, Executor._run_op, Executor._hook)
)


@run_by_tracer
def _refuse_traced() -> None:
    raise RuntimeError(HIDDEN)


def run_unwatched(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose ops are not watched when it runs: its saves have been seen to.

    A mode is asked about each op that a graph calls as a function.

    Args:
        graph: As AOTAutograd makes it.
    """

    @wraps(graph)
    def run(*args: Any) -> Any:
        mode = _get_current_function_mode()
        if not isinstance(mode, Executor) or mode.rounding is not None or mode.options.low:
            return graph(*args)
        mode.step_aside()
        try:
            return graph(*args)
        finally:
            mode.step_back()

    return run


def _form(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a call: what decides whether its op, which reads `x`, is replaced and by which one."""
    return x.shape, x.dtype, x.device, x.requires_grad, len(args), *kwargs


def _product(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> Tensor:
    return flatten(first())[0] * flatten(second())[0]


def _again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The function of the one tensor among its arguments, which it does not hold."""
    hollow = tree_map_only(Tensor, lambda _: _HOLE, (args, kwargs))

    def again(x: Tensor) -> Tensor:
        args, kwargs = tree_map(lambda leaf: x if leaf is _HOLE else leaf, hollow)
        return func(*args, **kwargs)

    return again


def _op_name(name: str, args: Sequence[Any]) -> str:
    """The op's name in sites: dunders and in-place marks stripped; `pow` with 2 is `square`."""
    name = name.strip("_")
    if name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 2:
        return "square"
    return name

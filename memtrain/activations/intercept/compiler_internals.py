"""Private API of torch.compile: settings, compiled modules, traced frames and graphs.

No other module uses this API. Exceptions: `torch._disable_dynamo`, which torch's optimizers use,
and a mark in `compressors/derivative.py`. Their public counterparts import Dynamo, in seconds.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch.autograd.graph import saved_tensors_hooks

from memtrain.activations.intercept.graph_nodes import is_tensor

_F = TypeVar("_F", bound=Callable[..., Any])

compiled_call: Callable[[nn.Module], Any] = attrgetter("_compiled_call_impl")
"""Returns what `module.compile()` has made of a module, or None."""
INSIDE = "_orig_mod"
"""Attribute of the result of `torch.compile` with the module inside."""

Settings = dict[str, dict[str, Any]]
"""Module of torch's -> names of its settings -> values."""

_AOT, _INDUCTOR = "torch._functorch.config", "torch._inductor.config"
COMPRESSING: Settings = {
    _AOT: {
        "saved_tensors_hooks_filtering_mode": "no_static",  # hooks are handed all but parameters
        # What a matrix product of the backward reads (the output of a normalization or of a
        # nonlinearity, a copy of a weight in another dtype) may be computed again from what is
        # saved beside it. Torch saves it to spare the backward that op; compressed, it would cost
        # bytes and errors twice.
        "ban_recompute_materialized_backward": False,
        # The backward is compiled at once, and so by what is set here too.
        "force_non_lazy_backward_lowering": True,
    },
    # A buffer that waits for the next tensor of its size is alive between the two: inductor lets
    # it wait where it expects the peak elsewhere, as it is without us.
    _INDUCTOR: {"allow_buffer_reuse": False},
}
"""While our graphs are compiled."""
PLAIN: Settings = {_AOT: {"saved_tensors_hooks_filtering_mode": "no_static"}}
"""The same where graphs are to save what they do without us, to see what that is."""


def configure(settings: Settings) -> Settings:
    """Change settings of imported modules; return their values before."""
    before: Settings = {}
    for path, values in settings.items():
        config = sys.modules.get(path)
        if config is not None:
            known = {name: getattr(config, name) for name in values if hasattr(config, name)}
            for name in known:
                setattr(config, name, values[name])
            before[path] = known
    return before


def inside_compiled(model: Any) -> nn.Module | None:
    """Return the module inside of the result of `torch.compile`; None for other modules."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return getattr(model, INSIDE) if compiled else None


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` or `module.compile()` has compiled the module itself."""
    return compiled_call(module) is not None or inside_compiled(module) is not None


def backend_of(module: nn.Module) -> Any:
    """Return the backend of a compiled module."""
    call: Any = module if inside_compiled(module) is not None else compiled_call(module)
    (context,) = (
        cell.cell_contents
        for cell in call.get_compiler_config.__closure__
        if hasattr(cell.cell_contents, "callback")
    )
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def compile_graphs_by(compiler: Callable[..., Any], backend: Any) -> Any:
    """Return a backend from `aot_autograd` with another compiler; None for other backends."""
    function = getattr(backend, "compiler_fn", backend)
    if type(function).__name__ != "AotAutograd":
        return None
    return type(function)(**{**function.kwargs, "fw_compiler": compiler, "bw_compiler": compiler})


def inductor_by(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backend `inductor` with a function in place of its code generation."""

    def inductor_graphs(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=compiler)

    return inductor_graphs


def is_dynamo_imported() -> bool:
    """Return whether Dynamo is imported; without it, nothing is compiled."""
    return "torch._dynamo" in sys.modules


def runs_under_dynamo() -> bool:
    """Return whether Dynamo traces this call, or runs its frames after a graph break."""
    if torch.compiler.is_compiling():
        return True
    frames = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    return frames.get_eval_frame_callback() is not None


def compiled_frames() -> int:
    """Return the number of frames that torch.compile has compiled in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["frames"]["ok"]


def forget_graphs() -> None:
    """Discard all graphs of the process: those of a module or its equals do not compress.

    Dynamo does not guard a graph by hooks that its module did not have: the graph would serve a
    wrapped module of the same class, even one that is compiled later.
    """
    if compiled_frames():
        torch.compiler.reset()


def compiled_regions(copied: nn.Module, root: str) -> frozenset[str]:
    """Return the paths of compiled modules in a copy of the module at path `root`."""
    found = [name for name, module in copied.named_modules() if inside_compiled(module) is not None]
    return frozenset(".".join(filter(None, (root, name))) for name in found)


def sync_hook_order(hooks: dict[int, Any]) -> None:
    """Give the dict beneath an `OrderedDict` of hooks the same order.

    Dynamo of torch 2.11 guards a graph by the hooks in the order of that dict, and refuses its own
    graph where one was prepended.

    Example:
        >>> from collections import OrderedDict
        >>> hooks = OrderedDict(a=1, b=2)
        >>> hooks.move_to_end("b", last=False)
        >>> sync_hook_order(hooks)
        >>> list(dict.keys(hooks))
        ['b', 'a']
    """
    if list(hooks) != list(dict.keys(hooks)):
        items = list(hooks.items())
        hooks.clear()
        hooks.update(items)


# -- Dynamo: the frame that is traced ------------------------------------------------------------


def run_untraced(*functions: Callable[..., Any]) -> None:
    """Let Dynamo run functions as they are, where they are frames of their own.

    The hooks of a module that is compiled whole are. Where such a call is traced as a part of
    another frame, it is traced as ever.
    """
    from torch._C._dynamo import eval_frame

    try:
        action: Any = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(action, action)
        for function in functions:
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        return  # of a torch that has no graphs for us either


def run_by_tracer(function: _F) -> _F:
    """Let Dynamo call a function while it traces, in place of tracing the function."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def frame_compiler() -> Callable[..., Any] | None:
    """Return the compiler of the frame that is being traced.

    Returns None where this version of torch lacks an internal that is used here.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._functorch import config
        from torch._functorch._aot_autograd import graph_compile

        output = InstructionTranslator.current_tx().output
        is_known = hasattr(output, _INSTALL) and hasattr(graph_compile, _CONTEXT)
        is_known = is_known and all(hasattr(config, name) for name in PLAIN[_AOT])
        return output.compiler_fn if is_known else None
    except (AttributeError, ImportError):
        return None


def compile_frame_by(compiler: Callable[..., Any], hooks: tuple[Any, Any]) -> None:
    """Give the frame that is traced now to another compiler.

    The frame counts as traced under the hooks, so that caches of whole compilations skip it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output: Any = InstructionTranslator.current_tx().output
    with saved_tensors_hooks(*hooks):
        output.saved_tensors_hooks_subgraph_names = getattr(output, _INSTALL)()
    output.compiler_fn = compiler


def guard_frame(ask: Callable[[], bool]) -> None:
    """Guard the frame that is being traced by the present answer of a function."""
    from torch._dynamo.source import GlobalStateSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    answer = ask()

    def memtrain_guard(builder: Any, guard: Any) -> None:
        text = f"{ask.__module__}.{ask.__qualname__}() is {answer}"
        root = builder.guard_manager.root
        root.add_lambda_guard(lambda _: ask() is answer, [text], guard.user_stack)

    output: Any = InstructionTranslator.current_tx().output
    output.guards.add(GlobalStateSource().make_guard(memtrain_guard))


_INSTALL = "maybe_install_saved_tensors_hooks_subgraphs"
_CONTEXT = "_get_saved_tensor_hook_context"


# -- AOTAutograd: the graphs that hooks are inlined into -----------------------------------------


def inlined_call(
    traced: Callable[[Any, fx.Graph, fx.Graph, fx.Node], Any],
) -> fx.GraphModule:
    """Return a graph of one call, without a hash, so that no cache of AOTAutograd serves.

    A cached graph would not say what it holds; code that inductor has generated is found in its own
    cache, by the graph with the hooks inlined. The call is given the forward, the backward, and the
    node of the forward whose saved tensor is packed or unpacked.
    """
    from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

    def call(x: Any) -> Any:
        context: Any = _get_saved_tensor_hook_context()
        if context is None:  # an op that the compiler runs for itself
            return x
        return traced(x, context["_fw_graph"], context["_bw_graph"], context["_node"])

    graph = fx.Graph()
    graph.output(graph.call_function(call, (graph.placeholder("x"),)))
    module = fx.GraphModule(nn.Module(), graph)
    # Past torch's layers around a graph; compilers read the graph. Each has a class of its own.
    type(module).__call__ = staticmethod(call)
    return module


def run_without_modes(graph: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    """Return a compiled graph that calls a function, and no torch function mode."""

    @wraps(graph)
    def run(*args: Any) -> Any:
        before()
        with _DisableTorchFunction():
            return graph(*args)

    return run


def static_inputs() -> list[int]:
    """Return the numbers of the current graph's inputs that are parameters or buffers."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "maybe_inline_graph_saved_tensors_hooks":
            return [*frame.f_locals["static_input_indices"]]
        frame = frame.f_back
    raise RuntimeError("a graph is packed by another function than torch's own")


def input_positions(
    placeholders: Collection[fx.Node], inputs: list[Tensor | None]
) -> dict[int, int]:
    """Map storages of a graph's inputs to the numbers of the tensors it was traced with."""
    values = [node.meta["val"] for node in placeholders if is_tensor(node)]
    storages = {x.untyped_storage()._cdata for x in values}
    found: dict[int, int] = {}
    for position, x in enumerate(inputs if values else []):
        fake = None if x is None else values[0].fake_mode.fake_tensor_converter._get_memo(x)
        if fake is not None and fake.untyped_storage()._cdata in storages:
            found.setdefault(fake.untyped_storage()._cdata, position)
    return found


def match_names(forward: fx.Graph, backward: fx.Graph) -> None:
    """Give the inputs of a backward the names of the forward's outputs, by which torch finds them.

    Where activation checkpointing keeps states of random generators, they have names of their own.
    """
    inputs = [
        node
        for node in backward.find_nodes(op="placeholder")
        if not str(node.target).startswith("tangents")
    ]
    outputs = forward.output_node().args[0]
    last = cast(Any, outputs)[-len(inputs) :] if inputs else []
    known, taken = {node.name for node in inputs}, {node.name for node in last}
    others = [node for node in inputs if node.name not in taken]
    for node, output in zip(others, [n for n in last if n.name not in known], strict=False):
        for other in backward.nodes:
            if other.name == output.name:
                other._rename(f"{output.name}_again")
        node.name = output.name


def no_modes() -> Any:
    """Return a context in which ops are neither traced nor faked."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()

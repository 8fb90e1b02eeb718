"""Compiled parts of a model: found, and compiled again for a copy, to run op by op."""

import types
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from torch import fx, nn

from memtrain.activations.intercept.compiler_internals import (
    INSIDE,
    backend_of,
    compile_graphs_by,
    compiled_call,
    inductor_by,
    inside_compiled,
)
from memtrain.activations.intercept.graph_nodes import source_name
from memtrain.activations.intercept.graph_sites import path_names

INDUCTOR = "inductor"
OP_BY_OP = ("aot_eager", "aot_eager_decomp_partition")
"""Backends that run the ops of their graphs one by one."""
_numbers = count(1)
_running: list[str] = []  # the module, as graphs name it, and the op of the node that runs now


def compiled_parts(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Find what of a model is compiled: by `torch.compile(module)` or by `module.compile()`.

    Returns the model inside of what `torch.compile` made of it, and the paths in it of compiled
    modules, with their backends. A backend whose graphs cannot be read is a ValueError.
    """
    found: dict[str, Any] = {}
    inside = inside_compiled(model)
    if inside is not None:
        found[""] = _backend_of(model)
        model = inside
    for name, module in model.named_modules():
        if inside_compiled(module) is not None:
            found[f"{name}.{INSIDE}".lstrip(".")] = _backend_of(module)
        elif compiled_call(module):
            found.setdefault(name, _backend_of(module))
    return model, found


def compile_parts(model: nn.Module, parts: Mapping[str, Any]) -> None:
    """Compile parts of a model so that what their graphs hold is that of a real run.

    Graphs are made as the backend makes them, and then run op by op, so that fake tensors will do
    and every op is seen. What torch has compiled of the original stays as it is.

    The model is a copy, which is changed.
    """
    copies: dict[Any, Any] = {}
    for path, backend in parts.items():
        module = model.get_submodule(path)
        forward = type(module).forward
        has_class_forward = isinstance(forward, types.FunctionType) and "forward" not in vars(
            module
        )
        if has_class_forward:
            # Torch caches compiled graphs by code object: a copy has its own cache. Torch 2.11
            # skips functions in its own files, so `_class_forward` calls those.
            code = _class_forward if forward.__module__.startswith("torch.") else forward
            module.forward = types.MethodType(copies.setdefault(forward, _copied(code)), module)
        module.compile(backend=_inductor_graphs if backend == INDUCTOR else backend)
        above = model.get_submodule(path.rpartition(".")[0])
        if inside_compiled(above) is not None:
            vars(above)["forward"] = module


def running_node() -> str:
    """Return the running op of a compiled graph and its module's path, as `mlp.act / gelu`."""
    return _running[-1] if _running else ""


def _backend_of(module: nn.Module) -> Any:
    """Return `inductor`, or another backend that runs op by op."""
    backend = backend_of(module)
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", repr(backend)))
    if name in (INDUCTOR, *OP_BY_OP):
        return name
    op_by_op = compile_graphs_by(_op_by_op, backend)
    if op_by_op is not None:
        return op_by_op
    raise ValueError(
        f"backend {name!r}: the tensors that its graphs keep are unknown; allowed: "
        f"{', '.join((INDUCTOR, *OP_BY_OP))}, or a backend from aot_autograd"
    )


def _class_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _copied(function: types.FunctionType) -> types.FunctionType:
    # Of another name: what torch knows of earlier calls (which sizes change) goes by that.
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _op_by_op(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    """A function that runs a graph's nodes one by one, freeing each value behind its last use."""
    interpreter = fx.Interpreter(graph)
    run_node = interpreter.run_node

    def run_known_node(node: fx.Node) -> Any:
        _running.append(_op_path(node))
        try:
            return run_node(node)
        finally:
            _running.pop()

    vars(interpreter)["run_node"] = run_known_node

    def run(args: list[Any]) -> Any:
        try:
            return interpreter.boxed_run(args)
        finally:
            interpreter.env = {}  # which holds the results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


_inductor_graphs = inductor_by(_op_by_op)


def _op_path(node: fx.Node) -> str:
    """The op of the forward that a node is of, after its module's path in the graph's own."""
    kind = "fwd_" if "fwd_source_fn_stack" in node.meta else ""
    stack = node.meta.get(f"{kind}source_fn_stack")
    paths = [str(path) for path, _ in (node.meta.get(f"{kind}nn_module_stack") or {}).values()]
    module = path_names(paths[-1])[2:] if paths else []  # without L['self']
    name = source_name(stack) if stack else str(node.target).partition(".")[2].partition(".")[0]
    return f"{'.'.join(module)} / {name}"

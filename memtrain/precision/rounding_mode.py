"""A torch function mode that rounds or records the inputs and results of a forward's ops."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from memtrain.activations.intercept.compiler_internals import run_by_tracer
from memtrain.activations.intercept.replaced_ops import Recogniser, run_as_one_op
from memtrain.activations.saved.saved_tensors import SavedTensors
from memtrain.precision.tensor_names import TensorNames

NOT_INTERCEPTED = (
    "tensors are rounded op by op, which torch.compile, jit.trace and torch.func's transforms "
    "hide; allowed there: precision.assignment=fp32"
)
"""The error for forwards whose ops cannot be rounded one by one."""

_GETTER = type(Tensor.shape.__get__)  # pyright: ignore[reportAttributeAccessIssue]


class RoundingMode(TorchFunctionMode):
    """Calls `arguments` and `result` around each torch function of a forward.

    Replaced ops run below this mode, each as one op. Saved tensors are visited above it, after an
    op's result has been rounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.module = ""
        """Path of the module whose forward runs."""
        self._names = TensorNames()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            _raise_traced()
        if type(func) is _GETTER:
            return func(*args, **kwargs)
        module, name = self.module, getattr(func, "__name__", "")
        if func is run_as_one_op:
            return self._run_as_one_op(*args)
        args, kwargs = self.arguments(module, name, args, kwargs)
        return self.result(module, _op_name(name, args), args, kwargs, func(*args, **kwargs))

    def _run_as_one_op(
        self, recognise: Recogniser, original: Any, module: nn.Module, x: Tensor
    ) -> Any:
        """Run a module as one op, of which only the result is rounded."""
        call = recognise(module, x)
        name = "" if call is None else call.op
        self.arguments(self.module, name, (x,), {})
        return self.result(
            self.module, name, (x,), {}, run_as_one_op(recognise, original, module, x)
        )

    def attach(self, saved: SavedTensors) -> None:
        """Set the `SavedTensors` of the forwards."""

    def begin(self, model: nn.Module, module: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin the outermost forward, that of `module`; return its arguments."""
        return args, kwargs

    def arguments(
        self, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Begin a torch function with this `__name__`; return its arguments."""
        self._names.note_versions(args, kwargs)
        return args, kwargs

    def result(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """End a torch function, with its op's name in sites; return its result."""
        return result

    def end(self, output: Any, *, completed: bool) -> Any:
        """End the outermost forward; `completed` is False after an exception."""
        return output


@run_by_tracer
def _raise_traced() -> None:
    raise RuntimeError(NOT_INTERCEPTED)


def _op_name(name: str, args: Sequence[Any]) -> str:
    """Return the op's name without underscores at its ends; `pow` with 2 is `square`."""
    name = name.strip("_")
    if name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 2:
        return "square"
    return name

"""Recognises calls of norms: torch's functions, and modules that write an RMS norm out."""

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from memtrain.activations.ops import batch_norm, norm
from memtrain.activations.ops.call import HOOKED
from memtrain.activations.ops.rms_norm import rms_norm
from memtrain.compressors import Compressor, Key

NAMES = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")

_FUNCTIONS = {
    "layer_norm": norm.layer_norm,
    "group_norm": norm.group_norm,
    "batch_norm": batch_norm.batch_norm,
    "instance_norm": batch_norm.instance_norm,
    "rms_norm": rms_norm,
}
_SIGNATURES = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    # Of torch.nn.functional's: torch's own functions of these names order them differently.
    "batch_norm": ("input", "running_mean", "running_var"),
    "instance_norm": ("input",),
}


@dataclass(frozen=True, eq=False)
class Norm:
    """A call of a norm: which, on what, and its other arguments."""

    op: str
    x: Tensor
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tensor: str = "input"

    def accepts(self, compressor: Compressor) -> bool:
        """Any that gives back floats, but the identity: plain torch is its exact twin.

        Groups that lie within rows of a layer norm would lose as little of x itself (512 rows of
        768, 4 bits, relative error of dx with x_hat and with x: 0.0080 and 0.0080 up to a mean of
        10 deviations, 0.0080 and 0.0091 at 100); but from x_hat the output, which the next layers
        save, can be computed again.
        """
        return not isinstance(compressor, HOOKED)

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value, with the payload of x_hat in place of x."""
        function = _FUNCTIONS[self.op]
        return function(self.x, *self.args, **self.options, compressor=compressor, key=key)


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Norm | None:
    """A call of a norm that takes the statistics of its input; None for another op.

    Evaluation with running statistics is left to hooks: it is a product with constants. So are
    `torch.batch_norm` and `torch.instance_norm` called directly, in their own order of arguments.
    """
    names = _SIGNATURES[name]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = values.get("input")
    if not isinstance(x, Tensor) or x.numel() == 0:
        return None
    given = {key: values[key] for key in ("weight", "bias", "eps", "momentum") if key in values}
    if name in ("layer_norm", "rms_norm"):
        return Norm(name, x, (tuple(values["normalized_shape"]),), given)
    if name == "group_norm":
        return Norm(name, x, (values["num_groups"],), given)
    own = values.get("training" if name == "batch_norm" else "use_input_stats", False)
    samples = x.numel() // x.shape[1] if name == "batch_norm" else x[0, 0].numel()
    if len(args) > len(names) or "cudnn_enabled" in values or not own or samples < 2:
        return None
    running = (values.get("running_mean"), values.get("running_var"))
    return Norm(name, x, (running,), given)


# The forms in transformers, as `ast.unparse` writes them: the body of `forward`, its argument
# called x and `variance_epsilon` eps, with the body of `_norm` where there is one.
_NORM = "\n_norm: return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
_WIDE = """\
input_dtype = x.dtype
x = x.to(torch.float32)
variance = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.eps)
"""
_WRITTEN = {
    _WIDE + "return self.weight * x.to(input_dtype)": "llama",
    _WIDE + "return (self.weight * x).to(input_dtype)": "cast_last",
    _WIDE + "return (self.weight.to(torch.float32) * x).to(input_dtype)": "cast_last",
    """\
output = self._norm(x.float())
output = output * (1.0 + self.weight.float())
return output.type_as(x)"""
    + _NORM: "gemma",
    """\
output = self._norm(x.float())
output = output * self.weight.float()
return output.type_as(x)"""
    + _NORM: "cast_last",
    """\
variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.eps)
if self.weight.dtype in [torch.float16, torch.bfloat16]:
    x = x.to(self.weight.dtype)
return self.weight * x""": "t5",
}


def writes_out(name: str) -> bool:
    """Whether a class of this name may write an RMS norm out.

    Example:
        >>> writes_out("LlamaRMSNorm"), writes_out("T5LayerNorm"), writes_out("Linear")
        (True, True, False)
    """
    return name.endswith(("RMSNorm", "LayerNorm"))


def recognise_module(module: nn.Module, x: Tensor) -> Norm | None:
    """The RMS norm that a module writes out, known by its source; None for any other code."""
    form = _form(type(module)) if "forward" not in vars(module) else None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if form is None or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if not isinstance(x, Tensor) or x.dim() == 0 or weight.shape != x.shape[-1:]:
        return None
    if x.numel() == 0 or x.element_size() > 4 or weight.element_size() > 4:
        return None
    return Norm("rms_norm", x, (weight.shape, weight, eps, form))


@cache
def _form(cls: type) -> str | None:
    body = _body(cls, "forward")
    if body is None:
        return None
    return _WRITTEN.get(body) or _WRITTEN.get(f"{body}\n_norm: {_body(cls, '_norm')}")


def _body(cls: type, method: str) -> str | None:
    """The statements of a method of one argument, without its docstring; None without source."""
    try:
        source = textwrap.dedent(inspect.getsource(vars(cls)[method]))
        (function,) = ast.parse(source).body
    except (KeyError, OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    arguments = [argument.arg for argument in function.args.args]
    if len(arguments) != 2:
        return None
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == arguments[1]:
            node.id = "x"
        elif isinstance(node, ast.Attribute) and node.attr == "variance_epsilon":
            node.attr = "eps"
    is_docstring = isinstance(function.body[0], ast.Expr) and ast.get_docstring(function)
    return "\n".join(ast.unparse(node) for node in function.body[1 if is_docstring else 0 :])

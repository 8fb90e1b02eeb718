"""Recognises calls of norms: torch's functions, and modules that write an RMS norm out."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from memtrain.activations.ops.batch_norm import batch_norm, group_norm, instance_norm
from memtrain.activations.ops.call import Call, gives_floats
from memtrain.activations.ops.layer_norm import layer_norm, rms_norm
from memtrain.activations.ops.method_sources import body_of, defined
from memtrain.compressors import Compressor, Key

_RUNNING = ("input", "running_mean", "running_var", "weight", "bias")
# The function, and the arguments that it may be given by position.
_NORMS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "layer_norm": (layer_norm, ("input", "normalized_shape", "weight", "bias", "eps")),
    "group_norm": (group_norm, ("input", "num_groups", "weight", "bias", "eps")),
    "rms_norm": (rms_norm, ("input", "normalized_shape", "weight", "eps")),
    "batch_norm": (batch_norm, (*_RUNNING, "training", "momentum", "eps")),
    "instance_norm": (instance_norm, (*_RUNNING, "use_input_stats", "momentum", "eps")),
}
NAMES = tuple(_NORMS)
FEW = 19
"""Values of a channel up to which batch and instance norms are ops of their own in rules,
`small_batch_norm` and `small_instance_norm`; other norms of so few are torch's. Their backward
removes two of N directions: noise of variance v in x_hat is 2 v / (N - 2) of the squared
gradient that is left, where that is random. With 4 bits in groups of 128, v = 0.02, two norms
lose more than the 4-bit codes of the hardswish between them (0.0047) up to N = 19; with 6 bits,
v = 0.0011, from N = 3 on they lose no more."""


def least_size(op: str, shape: Sequence[int], *node: Any) -> int:
    """Return a lower bound of the elements that a norm divides by their deviation."""
    if op in ("layer_norm", "rms_norm"):
        return shape[-1]
    return prod(shape) // shape[1] if op.endswith("batch_norm") else prod(shape[2:])


def _call(norm: str, x: Tensor, *args: Any, op: str = "", **options: Any) -> Call:
    """Return a call of a norm; `op` is its name in rules, where that is another.

    Groups that lie within rows of a layer norm would lose as little of x itself (512 rows of 768, 4
    bits, relative error of dx with x_hat and with x: 0.0080 and 0.0080 up to a mean of 10
    deviations, 0.0080 and 0.0091 at 100); but from x_hat the output, which the next layers save,
    can be computed again.
    """

    def run(compressor: Compressor, key: Key) -> Tensor:
        return _NORMS[norm][0](x, *args, **options, compressor=compressor, key=key)

    return Call(op or norm, x, run, gives_floats)


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Return a call of a norm that takes the statistics of its input; None for another op.

    Evaluation with running statistics is left to hooks: it is a product with constants.
    """
    names = _NORMS[name][1]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = values.get("input")
    if not isinstance(x, Tensor) or x.numel() == 0:
        return None
    options = {key: values[key] for key in ("weight", "bias", "eps", "momentum") if key in values}
    if name in ("layer_norm", "rms_norm"):
        shape = tuple(values["normalized_shape"])
        return None if prod(shape) <= FEW else _call(name, x, shape, **options)
    if name == "group_norm":
        groups = values["num_groups"]
        few = groups < 1 or x[0].numel() <= FEW * groups
        return None if few else _call(name, x, groups, **options)
    of_batch = name == "batch_norm"
    uses_batch = values.get("training", False) if of_batch else values.get("use_input_stats", True)
    samples = x.numel() // x.shape[1] if of_batch else x[0, 0].numel()
    if len(args) > len(names) or not uses_batch or samples < 2:
        return None
    if options.get("eps", 1.0) <= 0:  # which torch refuses
        return None
    running = (values.get("running_mean"), values.get("running_var"))
    return _call(name, x, running, op=f"small_{name}" if samples <= FEW else name, **options)


# The forms in transformers, as `ast.unparse` writes them: the body of `forward`, its argument
# called x and `variance_epsilon` eps, with the body of `_norm` where there is one.
_NORM = "\n_norm: return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
_POWER = """
_norm: mean_squared = x.pow(2).mean(-1, keepdim=True) + self.eps
return x * torch.pow(mean_squared, -0.5)"""
_WIDE = """\
input_dtype = x.dtype
x = x.to(torch.float32)
variance = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.eps)
"""
_SOURCES = {
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
normed_output = self._norm(x.float())
if self.with_scale:
    normed_output = normed_output * self.weight.float()
return normed_output.type_as(x)"""
    + _POWER: "cast_last",
    """\
variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.eps)
if self.weight.dtype in [torch.float16, torch.bfloat16]:
    x = x.to(self.weight.dtype)
return self.weight * x""": "t5",
}


def recognise_module(variant: str, module: nn.Module, x: Tensor) -> Call | None:
    """Return the call of a module whose class writes out an RMS norm of a form in `VARIANTS`."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or x.dim() == 0 or x.numel() == 0 or x.element_size() > 4:
        return None
    if x.shape[-1] <= FEW:
        return None
    if weight is None and getattr(module, "with_scale", None) is False:
        return _call("rms_norm", x, x.shape[-1:], None, eps)
    if not isinstance(weight, Tensor) or weight.shape != x.shape[-1:] or weight.element_size() > 4:
        return None
    return _call("rms_norm", x, weight.shape, weight, eps, variant)


def variant_of(cls: type) -> str | None:
    """Return the name in `VARIANTS` of the RMS norm that a class writes out, or None."""
    body = body_of(defined(cls, "forward"))
    if body is None:
        return None
    return _SOURCES.get(body) or _SOURCES.get(f"{body}\n_norm: {body_of(defined(cls, '_norm'))}")

"""Ops that are replaced whole: which module recognises a call of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from memtrain.activations.intercept.options import Options
from memtrain.activations.ops import (
    conv,
    cross_entropy,
    dropout,
    leaky_relu,
    nonlinear,
    norm_calls,
    pool,
    shape_only,
)
from memtrain.activations.ops.call import Call
from memtrain.compressors.fewbit.register import REGISTERED

Recognise = Callable[[str, Sequence[Any], Mapping[str, Any]], Call | None]

# By the torch function's name without underscores at either end. A recogniser is given the name
# with them, the arguments and the keyword arguments, and passes (None) on calls it leaves alone.
FUNCTIONS: dict[str, Recognise] = {
    **dict.fromkeys(nonlinear.NAMES, nonlinear.recognise),
    "cross_entropy": cross_entropy.recognise,
    "dropout": dropout.recognise,
    **dict.fromkeys(norm_calls.NAMES, norm_calls.recognise),
    **dict.fromkeys(pool.NAMES, pool.recognise),
    "prelu": leaky_relu.recognise,
    **dict.fromkeys(shape_only.NAMES, shape_only.recognise),
}

# By class name: modules that write one op out in several, each of which saves a tensor.
MODULES: dict[str, Callable[[nn.Module, Tensor], Call | None]] = {
    **dict.fromkeys(nonlinear.MODULES, nonlinear.recognise_module),
}


# By class name: modules of torch whose op is an `autograd.Function`, which no mode sees, and the
# op's name in sites. What another Function saves is its own affair.
FUNCTION_MODULES = {"SyncBatchNorm": "sync_batch_norm"}


# Smooth nonlinearities that save their input: from its payload the output, which the next op
# saves, can be computed again. (A step near a kink would be taken on the wrong side.)
SMOOTH = ("gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "softplus", "logsigmoid")


def is_replaced(name: str) -> bool:
    """Whether `recognise` may know a call of a torch function of this `__name__`.

    Example:
        >>> is_replaced("relu_"), is_replaced("addmm")
        (True, False)
    """
    base = name.strip("_")
    return base in FUNCTIONS or base in conv.NAMES or name in REGISTERED


def recognise(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options = Options(),  # noqa: B008 (a frozen value)
) -> Call | None:
    """The call of an op that can be replaced, or None.

    Args:
        name: The torch function's `__name__`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: `backward_bytes` makes convolutions calls.

    Example:
        >>> import torch
        >>> recognise("relu_", (torch.ones(3),), {}).op
        'relu'
    """
    base = name.strip("_")
    if base in conv.NAMES:
        return conv.recognise(name, args, kwargs, options.backward_bytes)
    recogniser = FUNCTIONS.get(base)
    if recogniser is None:
        return nonlinear.recognise_registered(name, args)
    return recogniser(name, args, kwargs)


def recognise_module(cls: type[nn.Module]) -> Callable[[nn.Module, Tensor], Call | None] | None:
    """The recogniser of modules of this class if it writes an op out, or None.

    Example:
        >>> class MishActivation(nn.Module):
        ...     pass
        >>> recognise_module(nn.Linear), recognise_module(MishActivation).__name__
        (None, 'recognise_module')
    """
    name = cls.__name__
    if name not in MODULES and name.endswith(norm_calls.SUFFIXES) and norm_calls.form_of(cls):
        return norm_calls.recognise_module
    return MODULES.get(name)


_EVERY_MODULES: tuple[Mapping[int, Any], ...] = (  # hooks, which torch adds in place
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def unwatched(module: nn.Module) -> bool:
    """Whether only we have hooks on the module: others would see that it runs as one op."""
    return (
        len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
        and not any(_EVERY_MODULES)
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )

"""Hooks that let a model with 16-bit weights take float32 inputs, and give float32 outputs."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

LAYERS = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm, nn.PReLU,
    nn.modules.instancenorm._InstanceNorm, nn.modules.rnn.RNNBase, nn.modules.rnn.RNNCellBase,
    nn.MultiheadAttention,
)  # fmt: skip
"""Layers that raise for an input of another dtype than their weights."""


def cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast float32 arguments to the dtype of the weights: a forward pre-hook.

    `torch.func.functional_call` may have replaced the weights by float32 ones.
    """
    low = any(p.dtype == dtype for p in module.parameters())
    if not low or all(x.dtype != torch.float32 for x in _tensors((args, kwargs))):
        return None
    return tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x, (args, kwargs)
    )


def restore_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    """Cast outputs of the weights' dtype to float32: a forward hook of the model.

    If an output is a single number, the model computes its own loss: only single numbers are cast,
    because float32 logits would double their memory. Under autocast nothing is cast.
    """
    found: list[Tensor] = []
    map_tensors(lambda x: found.append(x) or x, output)
    if any(torch.is_autocast_enabled(x.device.type) for x in found[:1]):
        return output
    has_loss = any(x.is_floating_point() and not x.dim() for x in found)
    known: dict[Tensor, Tensor] = {}  # by identity

    def restored(x: Tensor) -> Tensor:
        if x.dtype != dtype or (has_loss and x.dim()):
            return x
        if x not in known:
            known[x] = x.float()
        return known[x]

    return map_tensors(restored, output)


def map_tensors(function: Callable[[Tensor], Any], output: Any) -> Any:
    """Apply a function to the tensors in containers and dataclasses, which are copied."""
    return tree_map(partial(_mapped, function), output)


def _mapped(function: Callable[[Tensor], Any], x: Any) -> Any:
    # No closure that calls itself: a cycle would keep the tensors until garbage is collected.
    if isinstance(x, Tensor):
        return function(x)
    if is_dataclass(x) and not isinstance(x, type):
        x = copy.copy(x)
        for field in fields(x):
            object.__setattr__(x, field.name, map_tensors(function, getattr(x, field.name)))
    return x


def hook(model: nn.Module, dtype: torch.dtype, *, outputs: bool = False) -> list[Any]:
    """Register hooks that cast inputs to the weights' dtype and `outputs` to float32.

    Of a container without a forward, the parts are hooked. Returns the handles.
    """
    inputs, handles = partial(cast_inputs, dtype), []
    for one in _called(model):
        handles.append(one.register_forward_pre_hook(inputs, with_kwargs=True))
        if outputs:
            handles.append(one.register_forward_hook(partial(restore_outputs, dtype)))
    number = RemovableHandle.next_id  # equal in all layers: Dynamo guards graphs by these
    for module in model.modules():
        if isinstance(module, LAYERS):
            RemovableHandle.next_id = number
            handles.append(module.register_forward_pre_hook(inputs, with_kwargs=True))
    return handles


def _called(model: nn.Module) -> list[nn.Module]:
    if type(model).forward is not nn.Module.forward:
        return [model]
    return [called for part in model.children() for called in _called(part)]


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]

"""DistributedDataParallel around a model: where memtrain refuses it."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.optim.wrappers.backward import released_by

RELEASED = (
    "gradients='release' under DistributedDataParallel: its buckets keep all gradients until "
    "step(), so released gradients would save no memory; allowed: gradients=keep, or FSDP2"
)


def refuse_released(module: nn.Module, args: Any) -> None:
    """Raise `RuntimeError` in a forward under DistributedDataParallel with released gradients.

    A forward pre-hook of the model; a copy of the model without its optimizer is not refused.
    """
    if not torch.distributed.is_available():
        return
    if torch.nn.parallel.DistributedDataParallel._active_ddp_module is None:
        return
    if any(released_by(param)() is not None for param in module.parameters()):
        raise RuntimeError(RELEASED)


def models_in_ddp(params: Iterable[Tensor]) -> list[nn.Module]:
    """Return every live DistributedDataParallel that reduces gradients of these parameters.

    A model has no reference to the DistributedDataParallel around it, so the search covers all
    objects of the process.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    trained, ddp = set(params), torch.nn.parallel.DistributedDataParallel
    live = [x for x in gc.get_objects() if issubclass(type(x), ddp)]
    return [x for x in live if not trained.isdisjoint(x.parameters())]


def refuse_training(models: Iterable[nn.Module]) -> None:
    """Make DistributedDataParallels refuse to train: `unwrap` changed their weights' dtype."""

    def refuse(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                "memtrain.unwrap has converted the weights of this DistributedDataParallel, whose "
                "buckets no longer reduce their gradients: put a new one around the model"
            )

    for model in models:
        model.register_forward_pre_hook(refuse)

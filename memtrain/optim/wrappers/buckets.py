"""Released gradients under DistributedDataParallel: updates follow each bucket's all-reduce."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.optim.wrappers.wrapper import WeakRef


def follow_ddp(find: Callable[[Tensor], WeakRef[Any]], module: Any, args: Any) -> None:
    """Let updates follow DDP's all-reduce once the model is found in it: a forward pre-hook.

    Args:
        find: Gives who updates a parameter, if anyone does: of a copy, the copy's.
        module: The model.
        args: Of its forward.
    """
    if not torch.distributed.is_available():
        return
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    optimizer = next(filter(None, (find(param)() for param in module.parameters())), None)
    if optimizer is None or optimizer.follows:
        return
    if any(find(param)() not in (None, optimizer) for param in module.parameters()):
        raise RuntimeError(
            "gradients=release of several optimizers under DistributedDataParallel, which takes "
            "one communication hook; allowed: gradients=keep, or one optimizer with more groups"
        )
    optimizer.follow(ddp)


def models_in_ddp(params: Iterable[Tensor]) -> list[nn.Module]:
    """Every live DistributedDataParallel that reduces the gradients of some of these parameters.

    A model has no reference to the one around it, so that all of the process's are looked at.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    own, ddp = set(params), torch.nn.parallel.DistributedDataParallel
    live = [x for x in gc.get_objects() if issubclass(type(x), ddp)]
    return [x for x in live if not own.isdisjoint(x.parameters())]


def refuse_training(models: Iterable[nn.Module]) -> None:
    """Let DistributedDataParallels refuse to train: their weights have another dtype by now."""

    def refuse(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                "memtrain.unwrap has converted the weights of this DistributedDataParallel, whose "
                "buckets would not reduce their gradients any more: make a new one around the model"
            )

    for model in models:
        model.register_forward_pre_hook(refuse)


def hook_buckets(release: Any, ddp: Any) -> None:
    """Register a communication hook that updates after each bucket's all-reduce.

    Args:
        release: A `ReleaseGradients`; it is not kept alive.
        ddp: A DistributedDataParallel without a communication hook.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    own, group = WeakRef(release), ddp.process_group

    def update(bucket: Any, reduced: Any) -> Tensor:
        buffer = reduced.value()[0] if isinstance(reduced.value(), list) else reduced.value()
        release = own()
        if release is not None:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                release.on_reduced(param, grad)
        return buffer

    # DDP checks these annotations.
    def reduce_then_update(
        state: Any, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[Tensor]:
        return allreduce_hook(group, bucket).then(lambda done: update(bucket, done))

    # Not as the hook's state, for DDP holds that: a process group cannot be copied.
    ddp.register_comm_hook(None, reduce_then_update)

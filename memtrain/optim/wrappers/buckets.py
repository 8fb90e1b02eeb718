"""Released gradients under DistributedDataParallel: updates follow each bucket's all-reduce."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    if optimizer is not None and not optimizer.follows:
        optimizer.follow(ddp)


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

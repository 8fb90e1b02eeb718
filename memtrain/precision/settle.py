"""The tensors of training, told by the model's first forward."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.activations.saved.origin import in_transform
from memtrain.activations.trace.fake_forward import Given
from memtrain.precision.graph import refuse_shards
from memtrain.precision.state import PrecisionState

UNSEEN = (
    "tensors are rounded op by op, which torch.compile, jit.trace and torch.func's transforms "
    "hide; allowed there: precision.assignment=fp32"
)


class Settles(Protocol):
    """What is asked of a plan."""

    @property
    def precision(self) -> PrecisionState | None:
        """The formats."""
        ...

    def settle_precision(self, model: nn.Module, batch: Any) -> None:
        """Choose them."""
        ...


class Settle:
    """A forward pre-hook of the model, before all others: settles precision, once.

    Args:
        plan: Whose precision it is.
    """

    def __init__(self, plan: Settles) -> None:
        self.plan, self._tracing = plan, False

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Trace the forward that begins, unless that has been done.

        Raises:
            RuntimeError: Where ops are not seen one by one.
            ValueError: If `fully_shard` has been applied to the model.
        """
        if _compiles() or torch.jit.is_tracing() or in_transform():
            raise RuntimeError(UNSEEN)
        refuse_shards(model)
        state = self.plan.precision
        if state is None or state.graph is not None or self._tracing:
            return
        self._tracing = True
        try:
            given = tree_map_only(Tensor, _alone, Given(args, kwargs))
            self.plan.settle_precision(model, given)
        finally:
            self._tracing = False


def _compiles() -> bool:
    """Whether Dynamo traces this call, or has given up on it and waits for the frames within."""
    if torch.compiler.is_compiling():
        return True
    frames = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    return frames.get_eval_frame_callback() is not None


def _alone(x: Tensor) -> Tensor:
    """`x` without what it was made of, which a trace has no use for."""
    return x.detach().requires_grad_(x.requires_grad)

"""Lion in plain torch, and fused optimizers with its momentum in 4 or 8 bits."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.kernels.step.update_rules import LionScalars, lion
from memtrain.optim.fused.fused import FusedStates, check_numbers, variant
from memtrain.optim.fused.payloads import real_view
from memtrain.optim.states import layout
from memtrain.optim.states.compressed_states import closure_loss
from memtrain.optim.states.targets import parts_of, refuse_sparse


class Lion(Optimizer):
    """Lion in plain torch, with a momentum of the parameter's dtype.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Weight of the momentum in the update, and its decay.
        weight_decay: Decoupled from the gradient.
        maximize: Ascend.

    Raises:
        ValueError: If a number is out of range.

    Memory:
        One state of the parameter's size and dtype.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> weight.grad = torch.tensor([3.0, 0.0, -1.0])
        >>> Lion([weight], lr=0.25).step()
        >>> weight.tolist()
        [0.75, 1.0, 1.25]

    Reference:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.
    """

    separable = True
    first_default = "B128/Power-1.5"
    """The compressor of a compressed momentum, unless one is chosen."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        check_numbers(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return the closure's loss.

        Raises:
            RuntimeError: For sparse gradients. Nothing has changed.
        """
        loss = closure_loss(closure)
        parts = parts_of(self.param_groups)
        for _, targets in parts:
            refuse_sparse(targets, type(self).__name__)
        for group, targets in parts:
            (b1, b2), lr = group["betas"], float(group["lr"])
            for param, grad, *_ in targets:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                real, momentum = real_view(param), real_view(self.state[param]["exp_avg"])
                grad = real_view(-grad if group["maximize"] else grad)
                real.mul_(1 - lr * group["weight_decay"])
                real.sub_((b1 * momentum + (1 - b1) * grad).sign_(), alpha=lr)
                momentum.mul_(b2).add_(grad, alpha=1 - b2)
        return loss


class Lion4bit(FusedStates):
    """Lion whose momentum is kept in blocks of 128 codes of 4 bits.

    Same update as `Lion`, computed in float32 and rounded once. A coordinate whose gradient is
    always zero does not move. Rounding to nearest would discard the 1% by which a step changes the
    momentum, so the momentum is rounded stochastically. The random bits are a hash of the element's
    momentum and weight: a repeated or resumed run gives the same result.

    The codes (`B128/Power-1.5`) are closer to each other at large values than those of `B128/DE`:
    the rounding has 0.4 of the variance. An element of the opposite sign of its block's largest is
    limited to 0.82 of it, so a normal momentum becomes 0.5% shorter in a step: `betas[1]` of 0.99
    acts as 0.985.

    Other arguments are those of `Lion`. `first` is the compressor of the momentum
    (`compressors.named`); parameters with at most `min_elements` elements keep a float32 momentum.

    Raises:
        ValueError: If a number is out of range, or a name is unknown.

    Memory:
        0.53 bytes per parameter. Lion: 4.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> optimizer = Lion4bit([weight], lr=0.25)
        >>> weight.grad = torch.full_like(weight, 3.0)
        >>> optimizer.step()
        >>> weight[0, 0].item()
        0.75

    Reference:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675;
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
    """

    update_rule = "lion"
    plain = Lion
    names = ("exp_avg",)
    first_default = Lion.first_default

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        first: str | None = None,
        min_elements: int = layout.MIN_ELEMENTS,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, first=first, min_elements=min_elements)

    def scalars(self, group: dict[str, Any], count: float) -> LionScalars:
        """As `FusedStates.scalars`."""
        b1, b2 = group["betas"]
        return lion(
            lr=float(group["lr"]),
            betas=(float(b1), float(b2)),
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )


Lion8bit = variant(
    Lion4bit,
    "Lion8bit",
    """`Lion4bit` with codes of 8 bits in blocks of 256 (1.02 bytes per parameter).

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """,
    bits=8,
    first_default="B256/DE",
)

"""Adam and AdamW with 4-bit and 8-bit moments: one fused step over all parameters."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from memtrain.kernels.step.update_rules import AdamWScalars, adamw
from memtrain.optim.fused.fused import FusedStates, variant
from memtrain.optim.states import layout


class AdamW4bit(FusedStates):
    """AdamW whose first moment is kept in blocks of 128 and second moment in rank-1, 4 bits each.

    Same update as `torch.optim.AdamW`, and as `torch.optim.Adam` with
    `decoupled_weight_decay=False`. Parameters may be float32, bfloat16 or float16 (the update is
    computed in float32 and rounded once). NaN or Inf in a gradient affects the same element, as in
    torch, and the moments of its block: skip such steps, as `GradScaler` does.
    A coordinate whose gradient is always zero does not move.

    `second` may be `"Rank-1/Linear"`, `"B128/Linear"` or `"factored"`, each with a fused kernel;
    with other compressors, each parameter is updated separately, with float32 moments.

    Other arguments are those of `torch.optim.AdamW`. `amsgrad`, `capturable` and `differentiable`
    are refused; `foreach` and `fused` have no effect. `first` and `second` are the compressors of
    the moments (`compressors.named`). `first="B128/DE+SR"` rounds stochastically, with the random
    bits of `Lion4bit`: the loss is lower in short runs. If the vectors of rank-1 or factored states
    cost over 0.08 bytes per parameter, and for 1-d parameters, blocks are used (see `describe`).
    Parameters with at most `min_elements` elements keep float32 states.

    Raises:
        ValueError: If a number is out of range, a name is unknown, or an option is refused.

    Memory:
        1.03 bytes per parameter (0.53 + 0.50), plus rank-1's vectors; factored 0.53. AdamW: 8.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> optimizer = AdamW4bit([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight[0, 0].item()
        0.8999999761581421

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
    """

    update_rule = "adamw"
    plain = AdamW
    new_options = ("decoupled_weight_decay",)
    names = ("exp_avg", "exp_avg_sq")
    counts = True

    def __init__(  # noqa: PLR0913 - torch.optim.AdamW's own arguments, and three
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        first: str | None = None,
        second: str | None = None,
        min_elements: int = layout.MIN_ELEMENTS,
        maximize: bool = False,
        decoupled_weight_decay: bool | None = None,
        amsgrad: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        by_default = self.plain is AdamW
        if weight_decay is None:
            weight_decay = 1e-2 if by_default else 0.0
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": (
                by_default if decoupled_weight_decay is None else decoupled_weight_decay
            ),
        }
        super().__init__(params, defaults, first=first, second=second, min_elements=min_elements)

    def plain_class(self) -> type[Optimizer]:
        """Return `Adam` if a group's weight decay is not decoupled."""
        decoupled = all(g.get("decoupled_weight_decay", True) for g in self.param_groups)
        return AdamW if decoupled else Adam

    def scalars(self, group: dict[str, Any], count: float) -> AdamWScalars:
        """As `FusedStates.scalars`."""
        b1, b2 = group["betas"]
        return adamw(
            count,
            lr=float(group["lr"]),
            betas=(float(b1), float(b2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            decoupled=group.get("decoupled_weight_decay", True),
        )


AdamW4bitFactor = variant(
    AdamW4bit,
    "AdamW4bitFactor",
    """`AdamW4bit` with the second moment of two or more dimensions factored into rows and columns.

    The first moment is rounded stochastically by default: `first="B128/DE+SR"`. The paper's
    `"B128/DE"`, rounded to nearest, takes 0.9 of the step's time. It ends short runs of networks
    higher, and least squares with noisy gradients lower.
    A NaN in a gradient spreads to the whole matrix in that step: all factors share a mean. If a
    mean of squares overflows (gradients of 1e18 or more), no element of the matrix moves again.
    Factors represent a moment of rank one. Beside few elements with far larger gradients, the other
    elements' second moments are too small, and their updates too large. After one gradient element
    of 10,000 times the usual size, the updates of a 96 x 128 matrix are 10 times as large, until
    its square has decayed. Use `AdamW4bit` or `AdamW8bit` for such parameters.

    Memory:
        0.53 bytes per parameter, plus 4 bytes for each row and column.

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 4.3.
    """,
    first_default="B128/DE+SR",
    second_default="factored",
)

Adam4bit = variant(
    AdamW4bit,
    "Adam4bit",
    """`AdamW4bit` with `torch.optim.Adam`'s weight decay: none, or added to the gradient.

    Reference:
        Kingma and Ba, Adam: A Method for Stochastic Optimization, arXiv:1412.6980.
    """,
    plain=Adam,
    new_options=(),
)

AdamW8bit = variant(
    AdamW4bit,
    "AdamW8bit",
    """AdamW with both moments in blocks of 256 codes of 8 bits: dynamic exponent, as bitsandbytes.

    No second moment is rounded to zero (`B256/DE-0`). Arguments, errors and the rest are those of
    `AdamW4bit`.

    Memory:
        2.03 bytes per parameter. AdamW: 8.

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """,
    bits=8,
    first_default="B256/DE",
    second_default="B256/DE-0",
)

AdamW8bitFactor = variant(
    AdamW8bit,
    "AdamW8bitFactor",
    """`AdamW8bit` with the second moment of two or more dimensions factored into rows and columns.

    NaN, Inf and rare gradients have the effects that `AdamW4bitFactor` states. 1-d parameters,
    and those whose factors would cost over 0.08 bytes per parameter, keep both moments in blocks
    of 256.

    Memory:
        1.02 bytes per parameter, plus 4 bytes for each row and column.
    """,
    second_default="factored",
)

Adam8bit = variant(
    AdamW8bit,
    "Adam8bit",
    """`AdamW8bit` with `torch.optim.Adam`'s weight decay: none, or added to the gradient.""",
    plain=Adam,
    new_options=(),
)

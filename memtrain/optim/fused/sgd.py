"""SGD with its momentum in 4 or 8 bits."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import SGD

from memtrain.kernels.step.update_rules import SGDScalars, sgd
from memtrain.optim.fused.fused import FusedStates, variant
from memtrain.optim.states import layout


class SGD4bit(FusedStates):
    """SGD whose momentum is kept in blocks of 128 codes of 4 bits.

    Same update as `torch.optim.SGD`. Parameters may be float32, bfloat16 or float16 (the update is
    computed in float32 and rounded once). A coordinate whose gradient is always zero does not move.

    Other arguments are those of `torch.optim.SGD`. `capturable` and `differentiable` are refused;
    `foreach` and `fused` have no effect. `first` is the compressor of the buffer
    (`compressors.named`); parameters with at most `min_elements` elements keep a float32 buffer.

    Raises:
        ValueError: If a number is out of range, a name is unknown, or an option is refused.

    Memory:
        0.53 bytes per parameter. SGD: 4.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> optimizer = SGD4bit([weight], lr=0.25, momentum=0.9)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight[0, 0].item()
        0.75

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 5.
    """

    update_rule = "sgd"
    plain = SGD
    names = ("momentum_buffer",)

    def __init__(  # noqa: PLR0913 - torch.optim.SGD's own arguments, and two
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        first: str | None = None,
        min_elements: int = layout.MIN_ELEMENTS,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "capturable": capturable,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, first=first, min_elements=min_elements)

    def check(self, group: dict[str, Any]) -> None:
        """As `FusedStates.check`."""
        super().check(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov needs momentum above 0 and no dampening, got momentum="
                f"{group['momentum']}, dampening={group['dampening']}"
            )

    @classmethod
    def state_names(cls, group: dict[str, Any]) -> tuple[str, ...]:
        """Return no buffer without momentum."""
        return cls.names if group["momentum"] else ()

    def scalars(self, group: dict[str, Any], count: float) -> SGDScalars:
        """As `FusedStates.scalars`."""
        names = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
        options = {name: group[name] for name in names}
        return sgd(lr=float(group["lr"]), first=bool(count == 1), **options)


SGD8bit = variant(
    SGD4bit,
    "SGD8bit",
    """`SGD4bit` with codes of 8 bits in blocks of 256 (1.02 bytes per parameter).

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """,
    bits=8,
    first_default="B256/DE",
)

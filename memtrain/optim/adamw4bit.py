"""AdamW with 4-bit moments: one fused decompress, update, compress over all parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.compressors.base import Compressor
from memtrain.compressors.codebook import Block
from memtrain.compressors.factored import Factored
from memtrain.compressors.identity import Identity
from memtrain.compressors.rank1 import Rank1
from memtrain.kernels import adamw
from memtrain.optim import layout
from memtrain.optim.base import CompressedStates, closure_loss, refuse_sparse

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW4bit(CompressedStates):
    """AdamW whose first moment is kept in blocks of 128 and second moment in rank-1, 4 bits each.

    Same update as `torch.optim.AdamW`, and as `torch.optim.Adam` with
    `decoupled_weight_decay=False`. A gradient with NaN or Inf spoils its element as in torch, and
    the moments of its block (see `kernels.adamw.adamw_step`): skip such steps, as `GradScaler`
    does. A coordinate whose gradient is always zero does not move.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate; a float or a tensor of one element.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient unless `decoupled_weight_decay` is False.
        first: Name of the first moment's compressor, see `compressors.named`.
        second: Name of the second moment's compressor: `"Rank-1/Linear"`, `"B128/Linear"`,
            `"factored"`; where rank-1's or factored's vectors cost over 0.08 bytes per parameter,
            and for 1-d parameters, blocks of 128 serve instead (`describe` tells).
        min_elements: Parameters of at most so many elements keep float32 states.
        maximize: Ascend.
        decoupled_weight_decay: AdamW's form, or Adam's.

    Raises:
        ValueError: If a number is out of range, or a name is unknown.

    Memory:
        1.03 bytes per parameter (0.53 + 0.50), plus rank-1's vectors; factored 0.53. AdamW: 8.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> optimizer = AdamW4bit([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight[0, 0].item()
        0.8999999761581421

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
    """

    def __init__(  # noqa: PLR0913 - torch.optim.AdamW's own arguments, and three
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        first: str = "B128/DE",
        second: str = "Rank-1/Linear",
        min_elements: int = layout.MIN_ELEMENTS,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
    ) -> None:
        self.choose = layout.Choice(first=first, second=second, min_elements=min_elements)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    @classmethod
    def taking_over(cls, original: Optimizer, choose: layout.Choose) -> "AdamW4bit":
        """An optimizer that shares the groups of a torch Adam or AdamW and has no states yet."""
        new = cls([{"params": group["params"]} for group in original.param_groups])
        new.choose = choose
        return new

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its options are checked."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient.

        Args:
            closure: Recomputes the loss; optional.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: For sparse or complex gradients; nothing was changed then.
        """
        loss = closure_loss(closure)
        refuse_sparse([p for g in self.param_groups for p in g["params"]], type(self).__name__)
        entries: list[adamw.Entry] = []
        for group in self.param_groups:
            numbers: dict[float, adamw.Hyper] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                step = self._advance(param)
                if step not in numbers:
                    numbers[step] = _hyper(group, step)
                self._add(entries, param, numbers[step])
        adamw.adamw_step(entries)
        self.tell_schedulers()
        return loss

    def _advance(self, param: Tensor) -> float:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            zeros = torch.zeros_like(
                param, dtype=moment_dtype(param), memory_format=torch.contiguous_format
            )
            for name in MOMENTS:
                packed = layout.pack(self.compressor(param, name)[0], zeros)
                state[name] = packed.clone() if isinstance(packed, Tensor) else packed
        state["step"] += 1
        return state["step"].item()

    def _add(self, entries: list[adamw.Entry], param: Tensor, numbers: adamw.Hyper) -> None:
        first, _ = self.compressor(param, "exp_avg")
        second, _ = self.compressor(param, "exp_avg_sq")
        kind = fused_kind(first, second)
        state = self.state[param]
        if kind is None:
            self._step_apart(param, first, second, numbers)
            return
        entries.append(
            adamw.Entry(
                param=param,
                grad=_grad(param),
                first=_as_payload(state["exp_avg"]),
                second=_as_payload(state["exp_avg_sq"]),
                kind=kind,
                hyper=numbers,
                first_map=getattr(first, "map", "DE"),
                second_map=getattr(second, "map", "Linear"),
            )
        )

    def _load_plain(self, param: Tensor, name: str, value: Tensor) -> Any:
        # The kernels read exact moments as contiguous float32, whatever the checkpoint holds.
        whole = value.detach().to(param.device, moment_dtype(param), copy=True).contiguous()
        return super()._load_plain(param, name, whole)

    def _step_apart(
        self, param: Tensor, first: Compressor, second: Compressor, numbers: adamw.Hyper
    ) -> None:
        """A combination without a fused kernel: the moments exist in float32 for a moment."""
        state = self.state[param]
        like = torch.empty(param.shape, dtype=moment_dtype(param), device="meta")
        m = layout.unpack(first, state["exp_avg"], like)
        v = layout.unpack(second, state["exp_avg_sq"], like)
        whole = {"tensor": m}, {"tensor": v}
        adamw.adamw_step([adamw.Entry(param, _grad(param), *whole, kind="exact", hyper=numbers)])
        state["exp_avg"], state["exp_avg_sq"] = layout.pack(first, m), layout.pack(second, v)


def _grad(param: Tensor) -> Tensor:
    return param.grad if param.grad is not None else torch.zeros_like(param)


def moment_dtype(param: Tensor) -> torch.dtype:
    """The moments' dtype: float32, and float64 for float64 parameters."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def fused_kind(first: Compressor, second: Compressor) -> str | None:
    """The kind of `kernels.adamw` that serves two compressors, or None."""
    if isinstance(first, Identity) and isinstance(second, Identity):
        return "exact"
    if not (isinstance(first, Block) and first.signed and _is_fused_block(first)):
        return None
    if isinstance(second, Factored):
        return "factored"
    if isinstance(second, Rank1):
        return "rank1" if second.bits == 4 and not second.signed else None
    if isinstance(second, Block) and _is_fused_block(second) and not second.signed:
        return "block"
    return None


def _is_fused_block(block: Block) -> bool:
    return block.bits == 4 and block.block_size == adamw.BLOCK


def check_group(group: dict[str, Any]) -> None:
    """Raise for a group's options that are out of range or not supported."""
    lr, (b1, b2) = float(group["lr"]), group["betas"]
    for name, value in (("lr", lr), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    for name, value in (("betas[0]", b1), ("betas[1]", b2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
    for name in ("amsgrad", "capturable", "differentiable"):
        if group.get(name):
            raise ValueError(f"AdamW4bit has no {name}: use CompressedOptimizer around torch's")


def _hyper(group: dict[str, Any], step: float) -> adamw.Hyper:
    if group.get("amsgrad"):
        raise ValueError("AdamW4bit has no amsgrad: use CompressedOptimizer around torch's")
    b1, b2 = group["betas"]
    return adamw.hyper(
        step,
        lr=float(group["lr"]),
        betas=(float(b1), float(b2)),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
        decoupled=group.get("decoupled_weight_decay", True),
    )


def _as_payload(value: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"tensor": value} if isinstance(value, Tensor) else value

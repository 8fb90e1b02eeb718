"""How many elements of moments keep nothing of an update, as a grid of few bits rounds it away."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Packed
from memtrain.compressors.codebook import Block
from memtrain.optim.states.shards import is_sharded

BLOCKS = 8  # of each state, spread over it
LATE = ("cuda",)
"""Types of devices that work later than the host asks: what is read there makes it wait."""


class Sample(NamedTuple):
    """Blocks of a state before a step."""

    name: str
    block: Block
    numbers: Tensor
    """Which blocks."""
    old: Tensor
    """Their elements, float32 [blocks, elements of one]."""
    weight: float
    """Elements of the state that one of these stands for."""

    def of(self, x: Tensor) -> Tensor:
        """The same elements of a contiguous tensor of the parameter's shape, in float32."""
        whole, size = x.numel() // self.block.block_size, self.block.block_size
        return x.detach().view(-1)[: whole * size].view(whole, size)[self.numbers].float()


def sample(name: str, compressor: Compressor, stored: Any, like: Tensor) -> Sample | None:
    """Look at some blocks of a state.

    Args:
        name: Of the state.
        compressor: Its.
        stored: Its payload, or what else is kept.
        like: The parameter.

    Returns:
        None where no scale belongs to one whole block: of other compressors, and of small, sharded
        or not contiguous parameters.
    """
    if type(compressor) is not Block or not isinstance(stored, dict) or is_sharded(like):
        return None
    whole = like.numel() // compressor.block_size
    if not whole or not like.is_contiguous():
        return None
    numbers = torch.arange(0, whole, max(1, whole // BLOCKS), device=like.device)[:BLOCKS]
    old = _decoded(compressor, stored, numbers)
    return Sample(name, compressor, numbers, old, like.numel() / old.numel())


def _decoded(block: Block, stored: dict[str, Tensor], numbers: Tensor) -> Tensor:
    shape = torch.Size([len(numbers), block.block_size])
    parts = {name: part[numbers] for name, part in stored.items()}
    return block.decompress(Packed(parts, shape, torch.float32))


class MomentStalls:
    """Shares of elements that stalled in the last step that was looked at.

    An element stalls where less than half of its update is in what is stored after the step. On a
    grid that stands still, rounded to the nearest, that is an update below half of the grid's step,
    of which nothing is stored. The scale of a block follows its largest element, though, and all
    its values follow the scale: so it is not asked whether a value is the same to the bit.

    Example:
        >>> from memtrain.compressors.base import Key
        >>> block, weight = Block(block_size=8, map="Linear", bits=3), torch.zeros(8)
        >>> old = torch.tensor([7.0, 1, 1, 1, 1, 1, 1, 1]) / 7  # the grid's step is 2 / 7
        >>> exact = old + torch.tensor([0.0, 0.9, 1.1, 0, 0, 0, 0, 0]) / 7
        >>> stalls = MomentStalls()
        >>> seen = sample("exp_avg", block, dict(block.compress(old, key=Key()).tensors), weight)
        >>> stalls.add(seen, seen.of(exact), dict(block.compress(exact, key=Key()).tensors))
        >>> stalls.shares()  # of two that were to move, one did
        {'exp_avg': 0.5}

    Reference:
        Topollai and Choromanska, Understanding Quantization of Optimizer States in LLM
        Pre-training, arXiv:2603.16731.
    """

    def __init__(self) -> None:
        self.step = 0
        self._sums: dict[tuple[str, torch.device], Any] = {}
        """Elements lost and to move, float64 [2]: on the device until somebody asks; on a CPU in
        NumPy, since a tensor that an optimizer holds is counted among its states' bytes."""

    def begin(self, step: int) -> None:
        """Begin a step's count; the parameters of a step may come in several calls."""
        if step != self.step:
            self.step = step
            self._sums.clear()

    def add(self, seen: Sample, exact: Tensor, stored: dict[str, Tensor]) -> None:
        """Compare what is stored now with what was to be.

        Args:
            seen: Blocks as they were.
            exact: The same elements as the step made them, before they were rounded.
            stored: Its payload.

        Memory:
            16 bytes for each name, on the tensors' device. No host waits for it.
        """
        update = (exact - seen.old).abs()
        landed = (_decoded(seen.block, stored, seen.numbers) - seen.old).abs()
        moving = update > 0
        lost = moving & (2 * landed < update)
        counts = seen.weight * torch.stack([lost.sum(), moving.sum()]).double()
        place = seen.name, counts.device
        self._sums[place] = self._sums.get(place, 0.0) + (
            counts if counts.device.type in LATE else counts.cpu().numpy()
        )

    def shares(self) -> dict[str, float]:
        """State -> stalled elements among those that were to move; waits for their devices."""
        sums: dict[str, list[float]] = {}
        for (name, _), counts in self._sums.items():
            lost, moving = counts.tolist()
            known = sums.setdefault(name, [0.0, 0.0])
            known[0] += lost
            known[1] += moving
        return {name: lost / moving for name, (lost, moving) in sums.items() if moving}

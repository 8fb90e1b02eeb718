"""Rows of the user's data; a batch is a pure function of (seed, step)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.compressors.base import Key
from memtrain.config.errors import in_range

SPLITS = ("train", "validation")
ALL = slice(None)


def generator(seed: int, split: str, index: int) -> torch.Generator:
    """Return the random generator of a batch (`split` and its index), or of the split itself."""
    site = ("split", *SPLITS).index(split)
    return torch.Generator().manual_seed(Key(seed=seed, site=site, step=index).bits())


class Rows:
    """Rows in epochs of seeded order; validation batches go through the held-out rows in turn."""

    def __init__(
        self,
        count: int,
        collate: Callable[[Sequence[int]], dict[str, Tensor]],
        *,
        validation: float,
        seed: int,
        unit: str = "rows",
        tokenizer: Any = None,
    ) -> None:
        in_range("data.validation", validation, at_least=0, below=1)
        least = 2 if validation else 1
        if count < least:
            raise ValueError(
                f"the data have {count} rows to learn from; allowed: at least {least} "
                f"(data.validation={validation})"
            )
        order = torch.randperm(count, generator=generator(seed, "split", 0))
        split = min(count - 1, max(1, round(validation * count))) if validation else 0
        self.parts = {"validation": order[:split], "train": order[split:].sort().values}
        self.collate, self.seed, self.unit, self.tokenizer = collate, seed, unit, tokenizer
        self._epoch: tuple[int, Tensor] | None = None

    def batches(self, split: str, size: int) -> int:
        """Return the number of whole batches of a split; 1 where it has fewer rows than `size`."""
        rows = len(self.parts[split])
        return max(1, rows // size) if rows else 0

    def batch(self, split: str, index: int, size: int, part: slice = ALL) -> dict[str, Tensor]:
        """Return rows `part` of batch `index` of `size` rows, by the order of its epoch."""
        rows = self.parts[split]
        epoch, position = divmod(index, self.batches(split, size))
        if split == "train":
            rows = rows[self._order(epoch, len(rows))]
        return self.collate(
            [int(rows[(position * size + k) % len(rows)]) for k in range(size)[part]]
        )

    def _order(self, epoch: int, count: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            order = torch.randperm(count, generator=generator(self.seed, "train", epoch))
            self._epoch = epoch, order
        return self._epoch[1]

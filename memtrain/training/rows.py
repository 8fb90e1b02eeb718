"""Rows on disk, a batch of them a pure function of (seed, step)."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from memtrain.compressors.base import Key
from memtrain.training.settings import in_range

SPLITS = ("train", "validation")
ALL = slice(None)


def generator(seed: int, split: str, index: int, row: int = 0) -> torch.Generator:
    """The random bits of a batch, or of a row of it."""
    site = ("split", *SPLITS).index(split)
    return torch.Generator().manual_seed(Key(seed=seed, site=site, step=index, call=row).bits())


class Rows:
    """Rows in epochs of seeded order; validation batches go through the held-out rows in turn.

    Args:
        rows: Numbers of the rows that can be trained on.
        validation: Fraction of them that is held out; 0 holds none out.
        seed: Of the split, the order and whatever is drawn for a row.

    Raises:
        ValueError: If there are too few rows.
    """

    kind = "labelled"
    unit = "rows"
    ragged = False
    """Whether batches differ in length."""

    def __init__(self, rows: Tensor, validation: float, seed: int) -> None:
        in_range("data.validation", validation, at_least=0, below=1)
        least = 2 if validation else 1
        if len(rows) < least:
            raise ValueError(
                f"the data have {len(rows)} rows to learn from; at least {least} must be there "
                f"(data.validation={validation})"
            )
        order = rows[torch.randperm(len(rows), generator=generator(seed, "split", 0))]
        held_out = min(len(rows) - 1, max(1, round(validation * len(rows)))) if validation else 0
        self.parts = {"validation": order[:held_out], "train": order[held_out:].sort().values}
        self.seed = seed
        self._epoch: tuple[int, Tensor] | None = None

    def batches(self, split: str, size: int) -> int:
        """Whole batches of a split; one, smaller batch where it has fewer rows."""
        rows = len(self.parts[split])
        return max(1, rows // size) if rows else 0

    def batch(self, split: str, index: int, size: int, part: slice = ALL) -> dict[str, Tensor]:
        """Rows `part` of a batch of `size` in the epoch that batch `index` falls in.

        What is drawn for a row does not depend on the part that it is read in.
        """
        rows = self.parts[split]
        epoch, position = divmod(index, self.batches(split, size))
        if split == "train":
            rows = rows[self._order(epoch, len(rows))]
        places = range(size)[part]
        chosen = [int(rows[(position * size + place) % len(rows)]) for place in places]
        draws = [generator(self.seed, split, index, 1 + place) for place in places]
        return self.collate(chosen, draws)

    def _order(self, epoch: int, count: int) -> Tensor:
        if self._epoch is None or self._epoch[0] != epoch:
            order = torch.randperm(count, generator=generator(self.seed, "train", epoch))
            self._epoch = epoch, order
        return self._epoch[1]

    @abstractmethod
    def collate(self, rows: Sequence[int], draws: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """A model's arguments, of rows by their numbers and random bits for each."""

    @abstractmethod
    def longest(self, size: int) -> dict[str, Tensor]:
        """A batch as large as any of `size` rows can be."""

"""Rows of the user's data; a batch is a pure function of (seed, step)."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from memtrain.compressors.base import Key
from memtrain.config.user_functions import user_function
from memtrain.training.settings import in_range

SPLITS = ("train", "validation")
ALL = slice(None)


def generator(seed: int, split: str, index: int) -> torch.Generator:
    """Return the random generator of a batch (`split` and its index), or of the split itself."""
    site = ("split", *SPLITS).index(split)
    return torch.Generator().manual_seed(Key(seed=seed, site=site, step=index).bits())


class Rows:
    """Rows in epochs of seeded order; validation batches go through the held-out rows in turn.

    Args:
        rows: Numbers of the rows that can be trained on.
        validation: Fraction of them that is held out; 0 holds none out.
        seed: Seeds the split and the order.

    Raises:
        ValueError: If there are too few rows.
    """

    unit = "rows"
    ragged = False
    """Whether batches differ in length."""

    def __init__(self, rows: Tensor, validation: float, seed: int) -> None:
        in_range("data.validation", validation, at_least=0, below=1)
        least = 2 if validation else 1
        if len(rows) < least:
            raise ValueError(
                f"the data have {len(rows)} rows to learn from; allowed: at least {least} "
                f"(data.validation={validation})"
            )
        order = rows[torch.randperm(len(rows), generator=generator(seed, "split", 0))]
        held_out = min(len(rows) - 1, max(1, round(validation * len(rows)))) if validation else 0
        self.parts = {"validation": order[:held_out], "train": order[held_out:].sort().values}
        self.seed = seed
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

    @abstractmethod
    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the model's keyword arguments for rows, by their numbers."""

    @abstractmethod
    def longest(self, size: int) -> dict[str, Tensor]:
        """Return a batch as large as any batch of `size` rows."""


class FunctionRows(Rows):
    """Rows of a dataset that a user's function returns.

    Args:
        dataset: Has a length, and maps an index to a dict of tensors or numbers: a model's keyword
            arguments for one row, of the same shapes in every row.
        validation: As `Rows`.
        seed: As `Rows`.
    """

    def __init__(self, dataset: Any, validation: float, seed: int) -> None:
        self.dataset = dataset
        super().__init__(torch.arange(len(dataset)), validation, seed)

    def collate(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Stack rows."""
        return default_collate([self.dataset[row] for row in rows])

    def longest(self, size: int) -> dict[str, Tensor]:
        """Return the first row `size` times; all rows have its shapes."""
        return default_collate([self.dataset[0]] * size)


def py(seed: int, model: Any, *, path: str, validation: float = 0.1) -> FunctionRows:
    """Call a user's function `package.module:function` for a dataset, as `FunctionRows` takes it.

    Raises:
        ValueError: If there is no such function, or it raises.
        TypeError: If it returns something else, or rows that are not dicts.
    """
    dataset = user_function(path, "data")()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"data='py:{path}' returned a {type(dataset).__name__}, not a dataset")
    if len(dataset) and not isinstance(dataset[0], dict):
        kind = type(dataset[0]).__name__
        raise TypeError(f"data='py:{path}': a row is a {kind}; allowed: a dict of tensors by name")
    return FunctionRows(dataset, validation, seed)

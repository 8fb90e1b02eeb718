"""Data of `memtrain-train`. A batch is a pure function of (seed, step): resuming is exact."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import default_collate

from memtrain.config.user_functions import user_function
from memtrain.training import text_rows
from memtrain.training.networks import described
from memtrain.training.rows import Rows
from memtrain.training.settings import build_named


def py(seed: int, model: Any, *, path: str, validation: float = 0.1) -> Rows:
    """Call a user's function `package.module:function` for a dataset.

    The dataset has a length, and maps an index to a dict of tensors or numbers: a model's keyword
    arguments for one row, of the same shapes in every row.
    """
    dataset = user_function(path, "data")()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"data='py:{path}' returned a {type(dataset).__name__}, not a dataset")
    if len(dataset) and not isinstance(dataset[0], dict):
        kind = type(dataset[0]).__name__
        raise TypeError(f"data='py:{path}': a row is a {kind}; allowed: a dict of tensors by name")
    return Rows(
        len(dataset),
        lambda rows: default_collate([dataset[row] for row in rows]),
        validation=validation,
        seed=seed,
    )


SOURCES: dict[str, Callable[..., Rows]] = {"text": text_rows.text, "py": py}
"""Name in a config -> function of a seed, of the transformers model (`Pretrained` or None), and of
the config's other keys."""


def build_source(
    spec: Mapping[str, Any], seed: int, model: Mapping[str, Any] | None = None
) -> Rows:
    """Build the source of batches from `data`'s config and, for its tokenizer, the model's.

    Example:
        >>> source = build_source({"name": "text", "path": __file__, "sequence": 8}, seed=0)
        >>> source.batch("train", 0, 4)["input_ids"].shape
        torch.Size([4, 8])
    """
    return build_named("data", spec, SOURCES, seed, described(model or {}))

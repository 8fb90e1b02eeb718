"""Data of `memtrain-train`. A batch is a pure function of (seed, step): resuming is exact."""

from collections.abc import Callable, Mapping
from typing import Any

from memtrain.training import rows, text_rows
from memtrain.training.networks import described
from memtrain.training.rows import Rows
from memtrain.training.settings import build_named

SOURCES: dict[str, Callable[..., Rows]] = {
    "text": text_rows.text,
    "jsonl": text_rows.jsonl,
    "py": rows.py,
}
"""Name in a config -> function of a seed, of the transformers model (`Pretrained` or None), and of
the config's other keys."""


def build_source(
    spec: Mapping[str, Any], seed: int, model: Mapping[str, Any] | None = None
) -> Rows:
    """Build the source of batches from `data`'s config and, for its tokenizer, the model's.

    Raises:
        ValueError: For an unknown name or field (with the nearest valid one), or a bad value.
        TypeError: For a value of the wrong type.
        ModuleNotFoundError: If the data need a package that is not installed.
        FileNotFoundError: If there are no files.

    Example:
        >>> source = build_source({"name": "text", "path": __file__, "sequence": 8}, seed=0)
        >>> source.batch("train", 0, 4)["input_ids"].shape
        torch.Size([4, 8])
    """
    return build_named("data", spec, SOURCES, seed, described(model or {}))

"""Patches of transformers: under fake tensors it builds attention masks that no real run has."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_MODULE = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"
_IGNORED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def one_sequence_per_row(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Treat every row of a batch as one whole sequence, as it mostly is.

    transformers reads position ids to find several sequences packed in one row, and the attention
    mask to find padding. Where it cannot read them it builds a mask of sequence x sequence to be
    safe, which attention then saves. Without transformers, or one that has no such functions,
    nothing happens.

    Inside `torch.compile` a real run cannot read them either: transformers is left as it is.

    If an `attention_mask` with data has padding, transformers is left as it is: a real run builds
    that mask too.
    """
    module: Any = sys.modules.get(_MODULE)
    padded = any(_padded(name, value) for name, value in kwargs.items())
    names = [name for name in (_PACKED, *(() if padded else _IGNORED)) if hasattr(module, name)]
    originals = {name: getattr(module, name) for name in names}
    for name, original in originals.items():
        setattr(module, name, _without_data(original, finds=name == _PACKED))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _padded(name: str, value: Any) -> bool:
    """Return whether this is a mask of tokens, with data, that leaves some out."""
    if not name.endswith("attention_mask") or not isinstance(value, Tensor):
        return False
    if isinstance(value, FakeTensor) or value.is_meta:
        return False
    with unset_fake_temporarily():
        return not bool(value.all())


def _without_data(original: Any, *, finds: bool) -> Callable[..., Any]:
    """Return the original function, which outside of graphs finds one sequence a row, unpadded."""

    def read(x: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(x, *args, **kwargs)
        return None if finds else original(None, *args, **kwargs)

    return read

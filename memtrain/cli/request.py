"""What `memtrain-report` is asked for: a model by name, its batch, its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memtrain.config import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}


@dataclass(kw_only=True)
class Request:
    """What `memtrain-report` is asked for, besides memtrain's own keys."""

    model: str = ""
    """A name of `FAMILIES`, `hf:<config.json or its folder>` or `py:<module>:<builder>`."""
    batch: int = 1
    """Samples."""
    seq: int | None = None
    """Tokens per sample, for text."""
    image: int | None = None
    """Height and width, for images; 224 by default."""
    dtype: str = "float32"
    """Of weights, gradients and activations."""
    labels: bool = True
    """Whether the model gets labels, so that the loss's saved tensors count."""
    attention: str | None = None
    """`eager` or `sdpa`; transformers' choice by default."""
    dropout: float | None = None
    """Every dropout of the config; as the config says by default."""
    optimizer: str = "adamw"
    """A name of `OPTIMIZERS`."""

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                value = getattr(self, name)
                raise ValueError(f"unknown {name} {value!r}; {nearest(value, list(allowed))}")
        if self.attention not in (None, "eager", "sdpa"):
            hint = nearest(str(self.attention), ["eager", "sdpa"])
            raise ValueError(f"unknown attention {self.attention!r}; {hint}")
        for name in ("batch", "seq", "image"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is out of range; allowed: 1 or more")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is out of range; allowed: 0 to below 1")

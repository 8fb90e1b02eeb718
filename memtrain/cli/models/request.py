"""Request of `memtrain-report`: a model by name, its batch, its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.training_step import DEVICES
from memtrain.config.sizes import parse_size
from memtrain.config.sources import nearest

DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Other names of dtypes."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}
_MIN_WITHOUT_UNIT = 2**20
"""A size below it without a unit lacks its unit."""
_ALLOWED = {
    "dtype": tuple(DTYPES),
    "optimizer": tuple(OPTIMIZERS),
    "attention": (None, "eager", "sdpa"),
    "compile": ("false", "true", "blocks"),
    "device": DEVICES,
    "autocast": (None, "bfloat16", "float16"),
}


@dataclass(kw_only=True)
class Request:
    """The keys of `memtrain-report`, besides memtrain's keys."""

    model: str = ""
    """A name of `NAMED_MODELS`, `hf:<config.json or its folder>` or `py:<module>:<function>`."""
    batch: int = 1
    """Samples."""
    seq: int | None = None
    """Tokens per sample, for text."""
    image: int | None = None
    """Height and width, for images; 224 by default."""
    dtype: str = "float32"
    """Of weights, gradients and activations; `bf16` is bfloat16, and so on."""
    labels: bool = True
    """Whether the model gets labels, so that the loss's saved tensors count."""
    attention: str | None = None
    """`eager` or `sdpa`; transformers' choice by default."""
    dropout: float | None = None
    """Every dropout of the config; as the config says by default."""
    optimizer: str = "adamw"
    """A name of `OPTIMIZERS`."""
    compile: str = "false"
    """`true`: the model is compiled by `torch.compile`; `blocks`: each of its repeated blocks."""
    device: str | None = None
    """Whose kernels and allocator the predicted peak is of: a name of `DEVICES`; `cuda` by default,
    `cpu` of a compiled model."""
    autocast: str | None = None
    """`bfloat16` or `float16` around the predicted peak's forward."""
    context: str = "512MiB"
    """What the CUDA context and other processes take of the device of a budget or a memory."""
    memory: str | None = None
    """A size such as 24GiB: search the largest batch and the longest sequence that fit."""
    budget: str | None = None
    """A size such as 24GiB: plan so that the peak fits."""
    allow: str = "quantise,recompute"
    """Techniques that such a plan may use: names of `memtrain.planner.ALLOWED`."""
    max_error: float = 1.0
    """The most noise that it may bring, in units of the preset `balanced`'s."""
    objective: str = "time"
    """Objective of such a plan: `time` or `error`."""
    plan: str | None = None
    """A plan file, in place of memtrain's keys."""
    verify: bool = False
    """Whether the model is built, and its gradient on one batch compared with the exact one."""

    def __post_init__(self) -> None:
        self.dtype = DTYPE_ALIASES.get(self.dtype, self.dtype)
        self.autocast = DTYPE_ALIASES.get(str(self.autocast), self.autocast)
        self.compile = str(self.compile).lower()
        self.device = self.device or ("cuda" if self.compile == "false" else "cpu")
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                hint = nearest(str(value), [one for one in allowed if one is not None])
                raise ValueError(f"unknown {name} {value!r}; {hint}")
        if self.compiled:
            self._check_compiled()
        for name in ("batch", "seq", "image"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is out of range; allowed: 1 or more")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is out of range; allowed: 0 to below 1")
        parse_size(self.context, "context")
        for name in ("memory", "budget"):
            value = getattr(self, name)
            if value is not None and parse_size(value, name) == 0:
                raise ValueError(f"{name}={value} is out of range; allowed: 1B or more")
            if value is not None and value.isdigit() and int(value) < _MIN_WITHOUT_UNIT:
                raise ValueError(f"{name}={value} is {value} bytes; did you mean {value}GiB?")

    def _check_compiled(self) -> None:
        if self.device != "cpu":
            raise ValueError(
                f"device={self.device}: compiled steps are predicted as a CPU runs them; "
                f"allowed with compile={self.compile}: cpu"
            )
        if self.budget is not None:
            raise ValueError(
                f"compile={self.compile}: plans that fit are of eager steps; allowed with "
                "budget=: compile=false"
            )

    @property
    def compiled(self) -> bool:
        """Whether any part of the model is compiled."""
        return self.compile != "false"

    @property
    def step(self) -> StepOptions:
        """Return how the predicted step runs."""
        autocast = DTYPES[self.autocast] if self.autocast else None
        context = parse_size(self.context, "context")
        return StepOptions(device=self.device, autocast=autocast, context=context)

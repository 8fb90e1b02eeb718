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
"""Short names of dtypes."""
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
"""Smallest size that is accepted without a unit."""
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
    """Dtype of weights, gradients and activations; also `bf16`, `fp16`, `fp32`."""
    labels: bool = True
    """Whether the batch has labels; without labels, the loss's saved tensors do not count."""
    attention: str | None = None
    """`eager` or `sdpa`; transformers' default if empty."""
    dropout: float | None = None
    """Rate of every dropout of a transformers config; the config's rates if empty."""
    optimizer: str = "adamw"
    """A name of `OPTIMIZERS`."""
    compile: str = "false"
    """`true`: the model is compiled by `torch.compile`; `blocks`: each of its repeated blocks."""
    device: str | None = None
    """Device whose kernels and allocator are predicted: a name of `DEVICES`; by default `cuda`, for
    a compiled model `cpu`."""
    autocast: str | None = None
    """`bfloat16` or `float16`: the predicted forward runs under autocast."""
    context: str = "512MiB"
    """Memory of the CUDA context and of other processes, for `budget` and `memory`."""
    memory: str | None = None
    """A size such as 24GiB: search the largest batch and the longest sequence that fit."""
    budget: str | None = None
    """A size such as 24GiB: find a plan whose peak fits."""
    allow: str = "quantise,recompute"
    """Techniques that the planner may use: names in `memtrain.planner.ALLOWED`."""
    max_error: float = 1.0
    """Most noise of the plan, relative to the preset `balanced`."""
    objective: str = "time"
    """The planner's objective: `time` or `error`."""
    plan: str | None = None
    """A plan file, in place of memtrain's keys."""
    verify: bool = False
    """Whether to build the model, and compare its gradient on one batch with the exact one."""

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
                f"device={self.device} with compile={self.compile}: compiled steps are predicted "
                "for a CPU only; allowed: device=cpu"
            )
        if self.budget is not None:
            raise ValueError(
                f"compile={self.compile} with budget=: the planner plans eager steps only; "
                "allowed: compile=false"
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

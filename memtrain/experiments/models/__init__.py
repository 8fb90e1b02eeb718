"""Plain PyTorch models that know nothing of memtrain, and the registry of their names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memtrain.experiments.config import named
from memtrain.experiments.models.cifar import CifarConfig
from memtrain.experiments.models.gpt import GPTConfig
from memtrain.experiments.models.resnet import ResNetConfig

# name in a config -> dataclass with a `build()`
MODELS: dict[str, type[CifarConfig] | type[GPTConfig] | type[ResNetConfig]] = {
    "cifar": CifarConfig,
    "gpt": GPTConfig,
    "resnet": ResNetConfig,
}


def build_model(spec: Mapping[str, Any], seed: int, kind: str | None = None) -> nn.Module:
    """Build a model from its config with seeded weights.

    Args:
        spec: `{"name": "gpt", "layers": 4, ...}`; missing fields take their defaults.
        seed: Seeds torch's global generator; equal seeds give equal weights.
        kind: What the data gives, `"tokens"` or `"images"`, if that is to be checked.

    Returns:
        The model, fp32, on the CPU.

    Raises:
        ValueError: For an unknown name or field (with the nearest valid one), or a bad value;
            for a model that does not take this kind of data.
        TypeError: For a value of the wrong type.

    Example:
        >>> model = build_model({"name": "gpt", "layers": 1, "width": 16, "heads": 2}, seed=0)
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])
    """
    config = named("model", spec, MODELS)
    if kind not in (None, config.kind):
        raise ValueError(
            f"model.name={spec['name']!r} takes {config.kind}, but the data are {kind}"
        )
    torch.manual_seed(seed)
    return config.build()


__all__ = ["MODELS", "CifarConfig", "GPTConfig", "ResNetConfig", "build_model"]

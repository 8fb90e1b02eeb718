"""A small residual CNN for one-channel images, in plain PyTorch."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from memtrain.experiments.config import in_range


@dataclass(kw_only=True)
class ResNetConfig:
    """Two stages of residual blocks with a max-pool between them.

    Example:
        >>> import torch
        >>> ResNetConfig(width=8, blocks=1).build()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    kind: ClassVar[str] = "images"
    width: int = 32
    """Channels of the first stage; the second has twice as many."""
    blocks: int = 2
    """Residual blocks a stage."""
    classes: int = 10
    """Outputs."""

    def __post_init__(self) -> None:
        for name in ("width", "blocks", "classes"):
            in_range(f"model.{name}", getattr(self, name), at_least=1)

    def build(self) -> nn.Module:
        """A new model with random weights."""
        width = self.width
        return nn.Sequential(
            *_convolution(1, width),
            nn.ReLU(),
            *(Residual(width) for _ in range(self.blocks)),
            nn.MaxPool2d(2),
            *_convolution(width, 2 * width),
            nn.ReLU(),
            *(Residual(2 * width) for _ in range(self.blocks)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, self.classes),
        )


class Residual(nn.Module):
    """ReLU(x + f(x)) with two 3x3 convolutions and batch norms in f."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(width, width), nn.ReLU(), *_convolution(width, width)
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, height, width of the image] to the same."""
        return self.relu(x + self.branch(x))


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)

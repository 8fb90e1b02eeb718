"""VGG and DenseNet as torchvision has them, with GELU: rows of the few-bit paper's table."""

import torch
from torch import Tensor, nn

VGG = {
    "VGG 11": (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "VGG 16": (64, 64, 0, 128, 128, 0, *[256] * 3, 0, *[512] * 3, 0, *[512] * 3, 0),
    "VGG 19": (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0),
}
"""Name -> widths of its convolutions; 0 halves the image."""
DENSENET = {
    "DenseNet-121": (32, 64, (6, 12, 24, 16)),
    "DenseNet-161": (48, 96, (6, 12, 36, 24)),
    "DenseNet-169": (32, 64, (6, 12, 32, 32)),
    "DenseNet-201": (32, 64, (6, 12, 48, 32)),
}
"""Name -> growth, first width, layers of its blocks."""


def vgg(widths: tuple[int, ...]) -> nn.Module:
    """A VGG without normalisation.

    Args:
        widths: As in `VGG`.

    Returns:
        The model; it takes [batch, 3, height, width] and returns 1000 logits.

    Reference:
        Simonyan and Zisserman, Very Deep Convolutional Networks, 2014, arXiv:1409.1556.
    """
    layers, width = [], 3
    for wanted in widths:
        if wanted:
            layers += [nn.Conv2d(width, wanted, 3, padding=1), nn.GELU()]
            width = wanted
        else:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1000))


class _Dense(nn.Module):
    """One layer: what came before goes in whole, and comes out with `growth` channels more."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        middle = 4 * growth
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(width), nn.GELU(), nn.Conv2d(width, middle, 1, bias=False)),
            *(nn.BatchNorm2d(middle), nn.GELU()),
            nn.Conv2d(middle, growth, 3, padding=1, bias=False),
        )

    def forward(self, before: list[Tensor]) -> list[Tensor]:
        return [*before, self.layers(torch.cat(before, 1))]


class _Block(nn.Module):
    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Dense(width + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts = layer(parts)
        return torch.cat(parts, 1)


def densenet(growth: int, width: int, blocks: tuple[int, ...]) -> nn.Module:
    """A DenseNet.

    Args:
        growth: Channels that a layer adds.
        width: Channels of the first convolution.
        blocks: Layers of each block.

    Returns:
        The model; it takes [batch, 3, height, width] and returns 1000 logits.

    Reference:
        Huang et al., Densely Connected Convolutional Networks, 2016, arXiv:1608.06993.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.GELU(), nn.MaxPool2d(3, 2, 1)]
    for index, count in enumerate(blocks):
        layers.append(_Block(width, growth, count))
        width += growth * count
        layers += [nn.BatchNorm2d(width), nn.GELU()]
        if index + 1 < len(blocks):
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))

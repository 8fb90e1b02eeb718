"""ShuffleNet-v2 and ResNet-18 for small images, at any width."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

_SHUFFLE = ((116, 4), (232, 8), (464, 4))  # channels and units of a stage
_RESNET = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels and stride of a stage of two blocks


class Residual(nn.Module):
    """relu(x + f(x)), or with a shortcut in place of x."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] to the branch's shape."""
        return self.relu(self.branch(x) + (x if self.shortcut is None else self.shortcut(x)))


class Shuffle(nn.Module):
    """ShuffleNet-v2's unit: half of the channels pass by, then the halves are interleaved."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half, self.down = outputs // 2, stride == 2
        first = inputs if self.down else half
        self.left = _depthwise(first, half, stride) if self.down else None
        self.right = nn.Sequential(_unit(first, half, 1), _depthwise(half, half, stride))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height / stride, ...]."""
        if self.left is not None:
            left, right = self.left(x), self.right(x)
        else:
            left, x = x.chunk(2, dim=1)
            right = self.right(x)
        return torch.stack([left, right], dim=2).flatten(1, 2)


def _unit(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(*_norm(inputs, outputs, size, stride, groups), nn.ReLU())


def _norm(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(
        inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False
    )
    return convolution, nn.BatchNorm2d(outputs)


def _depthwise(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_norm(inputs, inputs, 3, stride, groups=inputs), _unit(inputs, outputs, 1)
    )


def _head(features: nn.Module, inputs: int, classes: int) -> nn.Sequential:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(features, pooled, nn.Linear(inputs, classes))


def _shufflenet(width: float, image_channels: int, classes: int) -> nn.Module:
    inputs = _scaled(24, width)
    features: list[nn.Module] = [_unit(image_channels, inputs, 3)]
    for channels, units in _SHUFFLE:
        outputs = _scaled(channels, width)
        features.append(Shuffle(inputs, outputs, stride=2))
        features += [Shuffle(outputs, outputs, stride=1) for _ in range(units - 1)]
        inputs = outputs
    last = _scaled(1024, width)
    features.append(_unit(inputs, last, 1))
    return _head(nn.Sequential(*features), last, classes)


def _resnet(width: float, image_channels: int, classes: int) -> nn.Module:
    inputs = _scaled(64, width)
    features: list[nn.Module] = [_unit(image_channels, inputs, 3)]
    for channels, stride in _RESNET:
        outputs = _scaled(channels, width)
        for step in (stride, 1):
            branch = nn.Sequential(_unit(inputs, outputs, 3, step), *_norm(outputs, outputs, 3))
            same = step == 1 and inputs == outputs
            shortcut = None if same else nn.Sequential(*_norm(inputs, outputs, 1, step))
            features.append(Residual(branch, shortcut))
            inputs = outputs
    return _head(nn.Sequential(*features), inputs, classes)


def _scaled(channels: int, width: float) -> int:
    """Channels times the width: an even number, at least 4."""
    return max(4, round(channels * width / 2) * 2)


FAMILIES: dict[str, Callable[[float, int, int], nn.Module]] = {
    "shufflenet_v2": _shufflenet,
    "resnet18": _resnet,
}


def cifar(
    *, family: str = "resnet18", width: float = 1.0, channels: int = 1, classes: int = 10
) -> nn.Module:
    """One of two convolutional families of the precision paper, for images of 8 x 8 and up.

    Args:
        family: `shufflenet_v2` or `resnet18`.
        width: Multiplies the channels of every stage, in (0, 4].
        channels: Of the images.
        classes: Outputs.

    Returns:
        The model; it takes [batch, channels, height, width] and returns logits [batch, classes].

    Raises:
        ValueError: For an unknown family.

    Example:
        >>> model = cifar(family="resnet18", width=0.25, channels=3)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Reference:
        Ma et al. 2018 (arXiv:1807.11164), He et al. 2016 (arXiv:1512.03385); the width multiplier
        is that of Howard et al. 2017 (arXiv:1704.04861).
    """
    if family not in FAMILIES:
        raise ValueError(f"model.family={family!r}; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[family](width, channels, classes)

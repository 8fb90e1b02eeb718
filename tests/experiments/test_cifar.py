"""The precision paper's convolutional families: sizes as published, at any width."""

import pytest
import torch

from experiments.cifar import cifar


@pytest.mark.parametrize(
    ("family", "parameters"),
    # as in the public CIFAR forms of them
    [
        ("shufflenet_v2", 1_263_854),
        ("resnet18", 11_173_962),
    ],
)
def test_cifar_families(family, parameters):
    model = cifar(family=family, channels=3)
    assert sum(p.numel() for p in model.parameters()) == parameters
    narrow = cifar(family=family, channels=3, width=0.1)
    for size in (8, 32):
        logits = narrow(torch.randn(2, 3, size, size))
        assert logits.shape == (2, 10)
    logits.sum().backward()
    assert all(p.grad is not None for p in narrow.parameters())

"""Launches of Triton kernels on the device where their tensors lie."""

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on its first argument's device, whichever is current.

    Triton compiles for the *current* CUDA device and queues the launch on that device's stream: a
    kernel with addresses of another device would fault.

    Args:
        kernel: A `@triton.jit` function.
        grid: Programs along each axis.
        *arguments: The kernel's, a tensor first.
        **options: The kernel's constants, and the launch's options.
    """
    device = arguments[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **options)

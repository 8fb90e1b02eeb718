"""The environment: machine, installed packages, and callers."""

import importlib.metadata
import platform
import sys

import torch

from memtrain.kernels import cpu

_PACKAGES = (
    "memtrain",
    "torch",
    "triton",
    "numpy",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "lightning",
    "bitsandbytes",
    "torchao",
    "hydra-core",
    "omegaconf",
)


def is_called_from(package: str) -> bool:
    """Return whether a function of a package is on the call stack.

    Args:
        package: A module, or a package with its modules.

    Example:
        >>> is_called_from("doctest"), is_called_from("torch.amp.grad_scaler")
        (True, False)
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
    return False


def collect_env() -> dict[str, str]:
    """Return versions, devices and available kernels, for a bug report.

    Returns:
        Name -> text; `-` for a missing package. Paths, host names and user names are not included.

    Example:
        >>> collect_env()["torch"] == torch.__version__
        True
    """
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    found["torch"] = str(torch.__version__)
    found["cpu capability"] = torch.backends.cpu.get_cpu_capability()
    found["cpu threads"] = str(torch.get_num_threads())
    found["C++ kernels"] = "no: the reference runs" if cpu.library() is None else "yes"
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    version = torch.version.cuda or (torch.version.hip and f"ROCm {torch.version.hip}") or "-"
    found["cuda"] = f"{version}: {', '.join(devices) or 'no device'}"
    return found

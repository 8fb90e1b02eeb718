"""Equality to the last bit of nested values: state dicts, checkpoints, lists of parameters."""

import torch


def differences(a, b, path=""):
    """The paths where two nested values differ in a dtype, keys, length or a bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(f"{path}.{key}", a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = [(f"{path}[{k}]", *pair) for k, pair in enumerate(zip(a, b, strict=True))]
    else:
        nested = isinstance(a, dict | list | tuple | torch.Tensor) or isinstance(b, torch.Tensor)
        return [path] if nested or a != b else []
    return [found for place, x, y in pairs for found in differences(x, y, place)]


def equal(a, b):
    """Whether two nested values are equal to the last bit."""
    return not differences(a, b)

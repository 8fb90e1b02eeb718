"""The states of torch's global random generators."""

from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The states of the CPU's generator and of every CUDA device's.

    Returns:
        `cpu`, a tensor, and `cuda`, a list of them.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(2)
        >>> set_random_state(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave; states of CUDA devices are left out where none is."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

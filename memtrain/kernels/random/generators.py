"""The states of torch's global random generators."""

from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the states of the CPU's generator (`cpu`) and of all CUDA devices (`cuda`)."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of `random_state`, without CUDA states if there is no device."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

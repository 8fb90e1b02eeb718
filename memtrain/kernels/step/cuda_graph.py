"""Whether a CUDA graph captures the current stream, and refusals of what it would not repeat."""

import torch


def capturing() -> bool:
    """Whether the current stream is captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse(owner: str, why: str) -> None:
    """Raise `RuntimeError` inside a capture, for what a replay would not repeat."""
    if capturing():
        raise RuntimeError(f"{owner} cannot be captured into a graph: {why}")

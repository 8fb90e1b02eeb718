"""Settings of an interception besides the choice for each site."""

from dataclasses import dataclass

import torch

from memtrain.activations.saved.site import CHECKPOINT_INPUT
from memtrain.compressors import Compressor, Keep

NORMS, SMOOTH, PRODUCTS = 1, 2, 3
"""Outputs of norms; of SiLU and GELU, from inputs in 4 bits or more; of products, dropout, adapters
and attention."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How saved tensors are handled, whatever their compressors."""

    min_elements: int = 1024
    """Smaller tensors are kept."""
    derives: int = NORMS
    """Which outputs that another op saves are recomputed from payloads: up to this; 0: none."""
    recompute: tuple[str, ...] = ()
    """Modules (globs, `@blocks`) that save only their inputs."""
    recompute_inputs: Compressor | Keep = CHECKPOINT_INPUT
    low: torch.dtype | None = None
    """The dtype of 16-bit weights: see `mixed_dtypes`."""

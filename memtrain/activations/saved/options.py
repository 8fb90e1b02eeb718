"""Settings of an interception besides the choice for each site."""

from dataclasses import dataclass

import torch

from memtrain.activations.saved.site import CHECKPOINT_INPUT
from memtrain.compressors import Compressor, Keep


@dataclass(frozen=True, kw_only=True)
class Options:
    """How saved tensors are handled, whatever their compressors."""

    min_elements: int = 1024
    """Smaller tensors are kept."""
    derive_outputs: bool = True
    """Whether a norm's output that another op saves is recomputed from the norm's payload."""
    derive_smooth: bool = False
    """Whether outputs of SiLU and GELU are recomputed from inputs in 4 bits or more."""
    derive_products: bool = False
    """Whether products and dropped outputs are recomputed too."""
    recompute: tuple[str, ...] = ()
    """Modules (globs, `@blocks`) that save only their inputs."""
    recompute_inputs: Compressor | Keep = CHECKPOINT_INPUT
    low: torch.dtype | None = None
    """The dtype of 16-bit weights: see `mixed_dtypes`."""

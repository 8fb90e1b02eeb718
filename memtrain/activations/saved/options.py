"""Settings of an interception besides the choice for each site."""

from dataclasses import dataclass

import torch

from memtrain.activations.saved.site import CHECKPOINT_INPUT
from memtrain.compressors import Compressor, Keep


@dataclass(frozen=True, kw_only=True)
class Options:
    """How saved tensors are handled, whatever their compressors."""

    min_elements: int = 1024
    derive_outputs: bool = True
    derive_smooth: bool = False
    derive_products: bool = False
    recompute: tuple[str, ...] = ()
    recompute_inputs: Compressor | Keep = CHECKPOINT_INPUT
    low: torch.dtype | None = None

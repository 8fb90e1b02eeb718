"""Settings of an interception besides the choice for each site."""

from dataclasses import dataclass

import torch

from memtrain.activations.saved.site import CHECKPOINT_INPUT
from memtrain.compressors import Compressor, Keep


@dataclass(frozen=True, kw_only=True)
class Options:
    """How saved tensors are handled, whatever their compressors.

    Args:
        min_elements: Smaller tensors are kept.
        derive_outputs: Whether a norm's output that another op saves is recomputed from the payload
            that the norm keeps.
        derive_smooth: Whether outputs of SiLU and GELU are recomputed from payloads of their inputs
            with 4 bits or more.
        derive_products: Whether products and dropped outputs are recomputed too.
        recompute: Modules (globs, `@blocks`) that keep their inputs only, and run again in the
            backward.
        recompute_inputs: The compressor of those inputs where they require a gradient; a reason to
            keep them otherwise.
        low: The dtype of weights that are kept in two bytes: ops that cannot mix it with float32,
            or do not know it, run as `mixed_dtypes` says.
    """

    min_elements: int = 1024
    derive_outputs: bool = True
    derive_smooth: bool = False
    derive_products: bool = False
    recompute: tuple[str, ...] = ()
    recompute_inputs: Compressor | Keep = CHECKPOINT_INPUT
    low: torch.dtype | None = None

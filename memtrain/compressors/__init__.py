"""What can be done to a tensor; one file a family, and the registry that configs name them by."""

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.identity import Identity

# name in a config -> class; a config's other keys are the class's fields
COMPRESSORS: dict[str, type] = {
    "identity": Identity,
}

__all__ = ["COMPRESSORS", "Compressor", "Identity", "Key", "Packed"]

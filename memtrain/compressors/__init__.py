"""What can be done to a tensor; one file a family, and the registry that configs name them by."""

from memtrain.compressors.base import Compressor, Keep, Key, Packed
from memtrain.compressors.codebook import Block
from memtrain.compressors.derivative import DerivativeCode
from memtrain.compressors.factored import Factored
from memtrain.compressors.floats import Float
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host
from memtrain.compressors.identity import Identity
from memtrain.compressors.lossless import Integers, Mask
from memtrain.compressors.patch import Patch
from memtrain.compressors.projection import Projection
from memtrain.compressors.rank1 import Rank1
from memtrain.compressors.samples import Samples
from memtrain.compressors.scaled import Scaled

# name in a config -> class; a config's other keys are the class's fields
COMPRESSORS: dict[str, type] = {
    "identity": Identity,
    "derivative": DerivativeCode,
    "group": Group,
    "samples": Samples,
    "host": Host,
    "projection": Projection,
    "mask": Mask,
    "integers": Integers,
    "block": Block,
    "patch": Patch,
    "rank1": Rank1,
    "scaled": Scaled,
    "factored": Factored,
    "float": Float,
}

__all__ = [
    "COMPRESSORS",
    "Block",
    "Compressor",
    "DerivativeCode",
    "Factored",
    "Float",
    "Group",
    "Host",
    "Identity",
    "Integers",
    "Keep",
    "Key",
    "Mask",
    "Packed",
    "Patch",
    "Projection",
    "Rank1",
    "Samples",
    "Scaled",
]

"""Compressors of tensors: one file each."""

from memtrain.compressors.base import Compressor, Keep, Key, Packed
from memtrain.compressors.codebook import Block
from memtrain.compressors.derivative import DerivativeCode
from memtrain.compressors.factored import Factored
from memtrain.compressors.floats import Float
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host
from memtrain.compressors.identity import Identity
from memtrain.compressors.lloyd_max import LloydMax
from memtrain.compressors.lossless import Integers, Mask
from memtrain.compressors.patch import Patch
from memtrain.compressors.rank1 import Rank1
from memtrain.compressors.registry import COMPRESSORS
from memtrain.compressors.samples import Samples

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
    "LloydMax",
    "Mask",
    "Packed",
    "Patch",
    "Rank1",
    "Samples",
]

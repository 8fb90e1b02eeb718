"""Compressors of tensors: one file each."""

from memtrain.compressors.base import STATE, Compressor, Keep, Key, Packed
from memtrain.compressors.codebook import Block
from memtrain.compressors.derivative import DerivativeCode
from memtrain.compressors.factored import Factored
from memtrain.compressors.floats import Float
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host
from memtrain.compressors.identity import Identity
from memtrain.compressors.lloyd_max import LloydMax
from memtrain.compressors.lossless import Integers
from memtrain.compressors.patch import Patch
from memtrain.compressors.rank1 import Rank1
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
    "Packed",
    "Patch",
    "Rank1",
    "Samples",
]

COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "derivative": DerivativeCode,
    "group": Group,
    "samples": Samples,
    "host": Host,
    "integers": Integers,
    "block": Block,
    "patch": Patch,
    "rank1": Rank1,
    "lloyd_max": LloydMax,
    "factored": Factored,
    "float": Float,
}
"""Name in a config -> class; a config's other keys are the class's fields."""


def check_role(compressor: Compressor, role: str, where: object = "") -> None:
    """Check that a compressor may be used in a role; `where` is a name for the message.

    Example:
        >>> check_role(Group(), STATE)
        >>> check_role(Integers(limit=2), STATE, "exp_avg")
        Traceback (most recent call last):
        ValueError: Integers(limit=2) as optimizer state (exp_avg); allowed: identity, group, ...
    """
    if compressor.serves(role):
        return
    allowed = ", ".join(name for name, cls in COMPRESSORS.items() if role in cls.roles)
    at = f" ({where})" if where else ""
    raise ValueError(f"{compressor!r} as {role}{at}; allowed: {allowed}")


def state_parts() -> frozenset[str]:
    """Return the names of all parts of registered compressors' payloads for states."""
    serving = (cls for cls in COMPRESSORS.values() if STATE in cls.roles and not cls.is_identity)
    return frozenset(part for cls in serving for part in cls.parts)

"""Compressors by the names that the literature gives them: `B128/DE`, `Rank-1/Linear`."""

import re
from difflib import get_close_matches

from memtrain.compressors.base import Compressor
from memtrain.compressors.codebook import Block
from memtrain.compressors.factored import Factored
from memtrain.compressors.identity import Identity
from memtrain.compressors.rank1 import Rank1
from memtrain.kernels.codebook import MAPS

_FIXED = ("identity", "factored")
_KNOWN = (
    *_FIXED,
    *(f"{scale}/{map}" for scale in ("B128", "B2048", "Rank-1") for map in MAPS),
)


def named(name: str, *, signed: bool, bits: int = 4) -> Compressor:
    """The compressor of a name.

    Args:
        name: `"identity"`, `"factored"`, `"Rank-1/<map>"` or `"B<block size>/<map>"`, with map
            `DE`, `DE-0` (unsigned only) or `Linear`.
        signed: Whether the state has negative values: first moments do, second moments do not.
        bits: Bits per code, 2 to 8.

    Returns:
        A frozen compressor.

    Raises:
        ValueError: If the name is unknown; the message gives the nearest valid one.

    Example:
        >>> named("B2048/DE", signed=True)
        Block(block_size=2048, map='DE', bits=4, signed=True)
    """
    if name == "identity":
        return Identity()
    if name == "factored":
        return Factored()
    if match := re.fullmatch(rf"(Rank-1|B(\d+))/({'|'.join(MAPS)})", name):
        scale, size, map = match.groups()
        if scale == "Rank-1":
            return Rank1(map=map, bits=bits, signed=signed)
        return Block(block_size=int(size), map=map, bits=bits, signed=signed)
    near = get_close_matches(name, _KNOWN, n=1, cutoff=0.0)
    raise ValueError(
        f"compressor {name!r} is unknown; the nearest valid name is {near[0]!r}; allowed: "
        f"identity, factored, Rank-1/<map> and B<block size>/<map> with map {', '.join(MAPS)}"
    )

"""Compressors by their names in the literature: `B128/DE`, `Rank-1/Linear`."""

import re
from difflib import get_close_matches

from memtrain.compressors.base import Compressor
from memtrain.compressors.codebook import Block
from memtrain.compressors.factored import Factored
from memtrain.compressors.identity import Identity
from memtrain.compressors.lloyd_max import LloydMax
from memtrain.compressors.rank1 import Rank1
from memtrain.kernels.codebook.values import CODEBOOKS, float_bits

_FIXED = {"identity": Identity, "factored": Factored, "Lloyd-Max": LloydMax}
_NAME = re.compile(
    r"(Rank-1|B(?P<size>\d+))"
    rf"/(?P<map>E\dM\d|{'|'.join(sorted(CODEBOOKS, key=len, reverse=True))})"
    r"(?P<bits>[2-8])?(?P<sr>\+SR)?"
)


def named(name: str, *, signed: bool, bits: int = 4) -> Compressor:
    """Return the compressor with a name.

    A name is `"identity"`, `"factored"`, `"Lloyd-Max"` (2 bits, for fused AdamW and Adam), or
    `"<scale>/<map>[bits][+SR]"`. The scale is `B<block size>` or `Rank-1`. The map is `DE`, `DE-0`
    (`DE` for signed states, as in the paper's code), `Linear`, `Power-2`, `Power-3` or a small
    float such as `E2M1`. `+SR` is stochastic rounding. `signed` is true for first moments only.
    `bits`, 2 to 8, counts if the name has no bits.

    Raises:
        ValueError: If the name is unknown; the message contains the nearest valid name.

    Example:
        >>> named("B2048/DE8", signed=True)
        Block(block_size=2048, map='DE', bits=8, signed=True, rounding='nearest')
    """
    if name in _FIXED:
        return _FIXED[name]()
    if not (match := _NAME.fullmatch(name)):
        known = (
            f"{scale}/{map}{end}"
            for scale in ("B128", "B2048", "Rank-1")
            for map in (*CODEBOOKS, "E2M1")
            for end in ("", "+SR")
        )
        near = get_close_matches(name, [*_FIXED, *known], n=1, cutoff=0.0)
        raise ValueError(
            f"compressor {name!r} is unknown; the nearest valid name is {near[0]!r}; allowed: "
            f"{', '.join(_FIXED)} and <scale>/<map>[bits][+SR] with scale B<block size> or Rank-1 "
            f"and map {', '.join(CODEBOOKS)}, E<1-5>M<0-6>"
        )
    map = "DE" if match["map"] == "DE-0" and signed else match["map"]
    bits = int(match["bits"] or float_bits(map, signed=signed) or bits)
    rounding = "stochastic" if match["sr"] else "nearest"
    if match["size"]:
        size = int(match["size"])
        return Block(block_size=size, map=map, bits=bits, signed=signed, rounding=rounding)
    return Rank1(map=map, bits=bits, signed=signed, rounding=rounding)

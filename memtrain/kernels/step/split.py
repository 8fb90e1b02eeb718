"""A float32 weight as a low-precision weight and a correction.

The step's kernels split and merge a block at a time. Whole weights (`split`, `merge`) are rare:
torch serves them on every device, a piece at a time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels.floats.formats import BF16
from memtrain.kernels.floats.rounding import draws
from memtrain.kernels.random.philox import signed

WEIGHTS = (torch.bfloat16, torch.float16)
CORRECTIONS = {torch.int8: 8, torch.int16: 16}
"""A correction's dtype -> its bits."""

_INF = 0x7F800000
_PIECE = 2**20
"""Elements of a whole weight that are worked on at a time."""
_STOCHASTIC = replace(BF16, rounding="stochastic")


class MasterWeight(NamedTuple):
    """Storage of the float32 master of a 16-bit weight: a correction, stochastic rounding, or none.

    Example:
        >>> weight = torch.empty(1, dtype=torch.bfloat16)
        >>> master = MasterWeight(torch.empty(1).short())
        >>> master.write(torch.tensor([0.1]), weight)
        >>> master.read(weight).item() == torch.tensor(0.1).item()
        True
    """

    correction: Tensor | None = None
    """As `split` takes it."""
    stochastic: bool = False
    seed: int = 0
    """64 bits, signed, as `Key.bits` returns."""
    block: int = 0
    """The runs of `rounding.BLOCK` elements that precede a part."""

    @property
    def any(self) -> bool:
        """Whether the weight is not its own master."""
        return self.correction is not None or self.stochastic

    def is_contiguous(self) -> bool:
        """Whether the kernels can read it."""
        return self.correction is None or self.correction.is_contiguous()

    def contiguous(self) -> "MasterWeight":
        """Return the storage with a contiguous correction."""
        if self.correction is None:
            return self
        return self._replace(correction=self.correction.contiguous())

    def read(self, weight: Tensor) -> Tensor:
        """Return the master by the reference: float32, or float64 for float64 weights."""
        weight = weight.detach()
        if self.any:
            return merge_reference(weight, self.correction)
        return weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)

    def write(self, master: Tensor, weight: Tensor) -> None:
        """Split a stepped value by the reference; without a master, round it."""
        weight = weight.detach()
        if not self.any:
            weight.copy_(master)
            return
        drawn = {"seed": self.seed, "stochastic": self.stochastic, "block": self.block}
        split_reference(master, weight, self.correction, **drawn)

    @property
    def mode(self) -> int:
        """MASTER of the Triton kernels: bits of correction; 1: stochastic rounding; 0: none."""
        return 1 if self.stochastic else _bits(self.correction)

    def fields(self) -> list[int]:
        """Struct MasterWeight of cpu/step/weights.h."""
        return [self._address(), _bits(self.correction), int(self.stochastic), self.seed]

    def _address(self) -> int:
        return 0 if self.correction is None else self.correction.data_ptr()


NO_MASTER = MasterWeight()
"""A weight is its own master."""


def split(
    master: Tensor,
    weight: Tensor,
    correction: Tensor | None = None,
    *,
    seed: int = 0,
    stochastic: bool = False,
) -> None:
    """Write `master` into `weight`, and what that rounding loses into `correction`.

    bfloat16: with c bits of correction the master is rounded to its upper 16 + c bits (to nearest,
    ties to even), `weight` is the bfloat16 nearest to that (ties away from zero: ties to even would
    take a bit more), and the correction is the signed difference of their bits. c = 16 loses
    nothing, c = 8 at most half an ulp of a 24-bit float (1 sign, 8 exponent and 15 mantissa bits):
    2**-16 of a normal number's magnitude. Without a correction the weight is rounded to nearest,
    ties to even, or stochastically: up with the probability of the lost part, over 2**16 levels.

    float16: the weight is rounded to nearest, ties to even, and the correction counts 2**-c of the
    weight's ulp, rounded to nearest and clamped to its dtype. c = 16 loses nothing of a master
    that is a normal float16 in magnitude (2**-14 to 65504), c = 8 at most 2**-8 of the ulp.

    Inf stays Inf. NaN stays NaN, with a correction of 0. A finite master
    too large for the rounded format becomes Inf. -0 and subnormals follow the rules above. The seed
    of stochastic rounding has 64 bits; equal seeds give equal weights. Temporaries take 32 MiB.

    Example:
        >>> master, weight = torch.tensor([1.001]), torch.empty(1, dtype=torch.bfloat16)
        >>> correction = torch.empty(1, dtype=torch.int8)
        >>> split(master, weight, correction)
        >>> weight.item(), correction.item(), merge(weight, correction).item()
        (1.0, 33, 1.00100708...)

    Reference:
        Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192 (stochastic rounding, and
        Kahan's correction).
    """
    _check(master, weight, correction)
    seed = signed(seed)
    if stochastic and (correction is not None or weight.dtype != torch.bfloat16):
        raise ValueError("stochastic=True needs a bfloat16 weight without a correction")
    if stochastic:
        weight.copy_(_STOCHASTIC.round(master, seed=seed))
        return
    for parts in _pieces(master, weight, correction):
        split_reference(*parts)


def merge(weight: Tensor, correction: Tensor | None = None) -> Tensor:
    """Return the float32 master of `split`, with the strides of a dense weight.

    Example:
        >>> merge(torch.ones(1, dtype=torch.bfloat16), torch.tensor([-1], dtype=torch.int16)).item()
        0.9999999403953552
    """
    master = torch.empty_like(weight, dtype=torch.float32)
    _check(master, weight, correction)
    for piece, low, lost in _pieces(master, weight, correction):
        piece.copy_(merge_reference(low, lost))
    return master


def _pieces(
    master: Tensor, weight: Tensor, correction: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the three tensors, or views of some rows of each."""
    rows = max(1, _PIECE * len(master) // max(1, master.numel())) if master.dim() else 1
    if master.numel() <= _PIECE or rows >= len(master):
        yield master, weight, correction
        return
    for begin in range(0, len(master), rows):
        at = slice(begin, begin + rows)
        yield from _pieces(master[at], weight[at], None if correction is None else correction[at])


def split_reference(
    master: Tensor,
    weight: Tensor,
    correction: Tensor | None = None,
    *,
    seed: int = 0,
    stochastic: bool = False,
    block: int = 0,
) -> None:
    """`split` in plain torch: the definition; `block` as in `MasterWeight`."""
    if weight.dtype == torch.float16:
        _split_float16(master, weight, correction)
        return
    kept = _bits(correction)
    bits = master.contiguous().view(torch.int32)
    magnitude, lost = bits & 0x7FFFFFFF, 16 - kept
    if stochastic:
        rounded = (magnitude + draws(master, seed, block).int()) >> lost
    elif lost:
        rounded = (magnitude + (1 << (lost - 1)) - 1 + ((magnitude >> lost) & 1)) >> lost
    else:
        rounded = magnitude
    nan = magnitude > _INF  # the only ones whose sums may pass 2**31
    upper = torch.where(nan, 0x7FC0, (rounded + ((1 << kept) >> 1)) >> kept)
    weight.copy_(((bits >> 16 & 0x8000) | upper).to(torch.int16).view(torch.bfloat16))
    if correction is not None:
        correction.copy_(torch.where(nan, 0, rounded - (upper << kept)))


def merge_reference(weight: Tensor, correction: Tensor | None = None) -> Tensor:
    """`merge` in plain torch: the definition."""
    if correction is None:
        return weight.float()
    kept = _bits(correction)
    if weight.dtype == torch.float16:
        return weight.float() + correction.float() * (_ulp(weight) * 2.0**-kept)
    # Bits of the magnitude: adding to them moves along the numbers, whatever the sign.
    bits = weight.contiguous().view(torch.int16).int() << 16
    return (bits + (correction.int() << (16 - kept))).view(torch.float32)


def _split_float16(master: Tensor, weight: Tensor, correction: Tensor | None) -> None:
    rounded = master.to(torch.float16)
    weight.copy_(rounded)
    if correction is None:
        return
    kept, whole = _bits(correction), rounded.float()
    difference = torch.where(whole.isfinite(), master - whole, 0.0)
    units = (difference * (2.0**kept / _ulp(rounded))).round_()
    limits = torch.iinfo(correction.dtype)
    correction.copy_(units.clamp_(limits.min, limits.max))


def _ulp(x: Tensor) -> Tensor:
    """Return the distance of float16 numbers at `x`, as float32; 1 for Inf and NaN."""
    exponent = (x.contiguous().view(torch.int16).to(torch.int32) & 0x7C00) >> 10
    ulp = ((exponent.clamp(min=1) + 102) << 23).view(torch.float32)  # 2**(exponent - 25)
    return torch.where(exponent == 31, 1.0, ulp)


def _bits(correction: Tensor | None) -> int:
    return 0 if correction is None else CORRECTIONS[correction.dtype]


def _check(master: Tensor, weight: Tensor, correction: Tensor | None) -> None:
    if master.dtype != torch.float32:
        raise TypeError(f"master is {master.dtype}; allowed: torch.float32")
    if weight.dtype not in WEIGHTS:
        raise TypeError(f"weight is {weight.dtype}; allowed: torch.bfloat16, torch.float16")
    if correction is not None and correction.dtype not in CORRECTIONS:
        raise TypeError(f"correction is {correction.dtype}; allowed: torch.int8, torch.int16, None")
    for name, tensor in (("weight", weight), ("correction", correction)):
        if tensor is not None and tensor.shape != master.shape:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} has shape {shape}, the master {tuple(master.shape)}")

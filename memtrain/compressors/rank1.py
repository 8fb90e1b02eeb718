"""The rank-1 compressor: an element's scale is the smallest of its dimensions' maxima."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.codebook import Block, why_blocks
from memtrain.kernels.codebook import rank1
from memtrain.kernels.step.shard import Shard, all_reduce, of_maxima


@dataclass(frozen=True, kw_only=True)
class Rank1(Compressor):
    """Codes of a map, scaled by the smallest of the maxima over each dimension: `Rank-1/Linear`.

    Tensors with fewer than two dimensions are quantised in blocks of 128 with the same map, as in
    the paper. An element decodes to NaN or Inf only if each of its dimensions contains a NaN or
    Inf. The fields are those of `Block`; a momentum needs signed scales.

    Memory:
        bits / 8 + 4 * sum(shape) / numel bytes per element.

    Example:
        >>> import torch
        >>> rank1 = Rank1()
        >>> rank1.decompress(rank1.compress(torch.tensor([[1.0, 2.0], [2.0, 4.0]]), key=Key()))
        tensor([[1., 2.],
                [2., 4.]])

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, section 4.2.
    """

    parts = ("codes", "scale")
    zeros_from_zeros = True
    first_moment = False
    by_rows = "rank1"

    map: str = "Linear"
    bits: int = 4
    signed: bool = False
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        self._block()  # raises for fields out of range

    def _block(self) -> Block:
        """Return blocks of 128 with the same codebook."""
        return Block(map=self.map, bits=self.bits, signed=self.signed, rounding=self.rounding)

    @property
    def second_moment(self) -> bool:
        """Whether the lowest value of the codebook is above 0."""
        return self._block().second_moment

    def for_shape(self, shape: torch.Size) -> tuple[Compressor, str]:
        """Return blocks of 128 with the same codebook if the vectors would take more bytes."""
        why = why_blocks("rank-1", shape, sum(shape))
        return (self._block() if why else self), why

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return codes uint8 [n_blocks, 128 * bits / 8] and scale float32 [sum(shape)]."""
        block = self._block()
        if x.dim() < 2:
            return block.compress(x, key=key)
        codes, scale = rank1.quantize(x, block.book, seed=block.seed(key))
        return Packed({"codes": codes, "scale": scale}, x.shape, x.dtype)

    def compress_part(self, x: Tensor, *, key: Key, shard: Shard) -> Packed:
        """Compress with the maxima of the whole tensor."""
        if x.dim() < 2:
            return self.compress(x, key=key)
        scale, block = rank1.maxima(x), self._block()
        all_reduce(of_maxima(scale, x.shape, shard), "max")
        codes = rank1.encode(x, scale, block.book, block.seed(key))
        return Packed({"codes": codes, "scale": scale}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return a contiguous tensor of the original shape and dtype."""
        block, (codes, scale) = self._block(), (packed.tensors[name] for name in self.parts)
        if len(packed.shape) < 2:
            return block.decompress(packed)
        return rank1.dequantize(codes, scale, block.book, shape=packed.shape).to(packed.dtype)

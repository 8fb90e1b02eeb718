"""The exact counterpart of every lossy compressor, which stores the tensor itself."""

from dataclasses import dataclass

from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed


@dataclass(frozen=True, kw_only=True)
class Identity(Compressor):
    """The tensor itself as payload: training is bit-identical to PyTorch.

    Memory:
        The tensor's own bytes; no copy is made.

    Example:
        >>> import torch
        >>> x = torch.arange(3.0)
        >>> Identity().decompress(Identity().compress(x, key=Key()))
        tensor([0., 1., 2.])
    """

    parts = ("tensor",)
    is_identity = True
    second_moment = True
    lossless = True

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return the tensor as its payload."""
        return Packed({"tensor": x}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the same tensor."""
        return packed.tensors["tensor"]

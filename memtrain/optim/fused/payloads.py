"""States as the fused steps take them: first payloads, dtypes, and the kernels' codecs."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor
from memtrain.compressors.codebook import Block
from memtrain.compressors.factored import Factored
from memtrain.compressors.lloyd_max import LloydMax
from memtrain.compressors.rank1 import Rank1
from memtrain.kernels.dispatch import is_simulated
from memtrain.kernels.step.codecs import BLOCKS, EXACT, FACTORED, LLOYD_MAX, Codec
from memtrain.optim.states import layout
from memtrain.optim.states.shards import local, sharded_like


def real_view(x: Tensor) -> Tensor:
    """Return a complex tensor as its real and imaginary parts, as torch's optimizers step it."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def zeros(compressor: Compressor, param: Tensor) -> Tensor | dict[str, Tensor]:
    """Return the payload of a zero state, without a float32 tensor if zero bytes decode to 0."""
    dtype, shape, device = moment_dtype(param), local(param).shape, param.device
    zeros = torch.empty if is_simulated() else torch.zeros  # fake tensors take long to fill
    if compressor.is_identity:
        return sharded_like(zeros(shape, dtype=dtype, device=device), param)
    if compressor.zeros_from_zeros and (parts := _parts(compressor, shape, dtype)) is not None:
        return {k: zeros(size, dtype=kind, device=device) for k, (size, kind) in parts.items()}
    return layout.pack(compressor, zeros(shape, dtype=dtype, device=device))


@cache
def _parts(
    compressor: Compressor, shape: torch.Size, dtype: torch.dtype
) -> dict[str, tuple[torch.Size, torch.dtype]] | None:
    """Return shapes and dtypes of a payload; None if it is no dict of contiguous tensors."""
    found = layout.pack(compressor, torch.empty(shape, dtype=dtype, device="meta"))
    if not isinstance(found, dict) or not all(t.is_contiguous() for t in found.values()):
        return None
    return {name: (t.shape, t.dtype) for name, t in found.items()}


def moment_dtype(param: Tensor) -> torch.dtype:
    """Return the states' dtype: float32, float64 for float64, complex for complex parameters."""
    if param.is_complex():
        return torch.promote_types(param.dtype, torch.complex64)
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def counter_dtype() -> torch.dtype:
    """Return the dtype of step counters: float32, or float64 if that is torch's default."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


@cache
def codec_of(compressor: Compressor, *, signed: bool) -> Codec | None:
    """Return the kernels' codec that equals a compressor, or None."""
    codec, plain = None, None  # a compressor with an option that the kernels lack differs
    if compressor.is_identity:
        codec, plain = EXACT, compressor
    elif isinstance(compressor, Factored):
        codec, plain = FACTORED, Factored()
    elif isinstance(compressor, LloydMax):
        codec, plain = LLOYD_MAX, LloydMax()
    elif isinstance(compressor, Rank1) and not signed:
        codec = Codec("rank1", 4, compressor.map, signed)
        plain = Rank1(map=compressor.map)
    elif isinstance(compressor, Block) and compressor.bits in BLOCKS:
        bits, name = compressor.bits, compressor.map
        drawn = compressor.rounding == "stochastic" and signed and bits == 4
        codec = Codec("block", bits, name, signed, drawn)
        rounding = "stochastic" if drawn else "nearest"
        plain = Block(
            block_size=BLOCKS[bits], map=name, bits=bits, signed=signed, rounding=rounding
        )
    return codec if compressor == plain else None


def as_payload(value: Any) -> Any:
    """Return a state as `Entry` takes it: a payload, an exact tensor under a name, or None."""
    return {"tensor": real_view(local(value))} if isinstance(value, Tensor) else value

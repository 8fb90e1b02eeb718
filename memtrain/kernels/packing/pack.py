"""Small unsigned integers at 1 to 8 bits each: contract, reference, dispatch.

Blocks of 256 elements in the layout of `packing.bits`, whatever the width.
"""

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, contiguous_nbytes, is_plain, register
from memtrain.kernels.packing import bits as bit_codes

BLOCK = 256  # elements per block


def pack_codes(x: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` bits (1 to 8) of each uint8 element, in logical order.

    Returns:
        uint8, [ceil(numel / 256) * 32 * bits]; the last block's padding is 0.

    Example:
        >>> packed = pack_codes(torch.tensor([1, 2, 3], dtype=torch.uint8), 2)
        >>> packed.shape, packed[:4].tolist()
        (torch.Size([64]), [1, 2, 3, 0])
    """
    return (_pack if is_plain(x) else _pack_op)(x, bits)


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Invert `pack_codes`: return uint8 [numel]."""
    return (_unpack if is_plain(packed) else _unpack_op)(packed, bits, numel)


def pack_reference(x: Tensor, bits: int) -> Tensor:
    """Compute `pack_codes` in plain torch: the definition."""
    return bit_codes.pack(bit_codes.blocks(x, BLOCK) & (2**bits - 1), bits).view(-1)


def unpack_reference(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Compute `unpack_codes` in plain torch: the definition."""
    blocks = packed.view(-1, BLOCK // 8 * bits)
    return bit_codes.unpack(blocks, bits).reshape(-1)[:numel].to(torch.uint8)


def _n_bytes(numel: int, bits: int) -> int:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits}; allowed: 1 to 8")
    return (numel + BLOCK - 1) // BLOCK * (BLOCK // 8 * bits)


def _empty_packed(x: Tensor, bits: int) -> Tensor:
    if x.dtype != torch.uint8:
        raise TypeError(f"dtype {x.dtype}; allowed: torch.uint8")
    return x.new_empty(_n_bytes(x.numel(), bits))


def _pack(x: Tensor, bits: int) -> Tensor:
    packed = _empty_packed(x, bits)
    chosen = choose(x)
    if chosen == "reference":
        return pack_reference(x, bits)
    x = x.contiguous()
    if chosen == "triton":
        from memtrain.kernels.packing import pack_triton

        pack_triton.pack(x, packed, bits)
    else:
        run, pack = cpu.packed("mt_pack_codes", "5q")
        run(pack(x.data_ptr(), packed.data_ptr(), x.numel(), bits, torch.get_num_threads()))
    return packed


def _empty_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    expected = (_n_bytes(numel, bits),)
    if packed.shape != expected or packed.dtype != torch.uint8:
        raise ValueError(
            f"packed is {packed.dtype} {tuple(packed.shape)}; {numel} elements of {bits} bits "
            f"need uint8 {expected}"
        )
    return packed.new_empty(numel)


def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    codes = _empty_codes(packed, bits, numel)
    chosen = choose(packed)
    packed = packed.contiguous()
    if chosen == "reference":
        return unpack_reference(packed, bits, numel)
    if chosen == "triton":
        from memtrain.kernels.packing import pack_triton

        pack_triton.unpack(packed, codes, bits)
    else:
        cpu.call("mt_unpack_codes", packed, codes, numel, bits)
    return codes


_pack_op = register(
    "pack_codes(Tensor x, int bits) -> Tensor",
    _pack,
    _empty_packed,
    inside=lambda x, bits: contiguous_nbytes(x),
    inside_cuda=lambda x, bits: contiguous_nbytes(x),
)
_unpack_op = register(
    "unpack_codes(Tensor packed, int bits, int numel) -> Tensor", _unpack, _empty_codes
)

"""Boolean tensors at one bit per element: contract, reference, dispatch."""

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import choose, is_plain, is_plain_cpu, register
from memtrain.kernels.packing import bits

BLOCK = 256  # elements per block; the layout is that of `kernels.packing.bits` at 1 bit


def pack_mask(x: Tensor) -> Tensor:
    """Pack a mask to one bit per element; what is not 0 is 1.

    Args:
        x: Any shape, bool or uint8, read in its logical order.

    Returns:
        uint8, [ceil(numel / 256) * 32]; the last block's padding is 0.

    Raises:
        TypeError: If `x` is neither bool nor uint8.

    Memory:
        1 / 8 byte per element, in whole blocks of 32 bytes.

    Example:
        >>> packed = pack_mask(torch.tensor([True, False, True]))
        >>> packed.shape, packed[:4].tolist()
        (torch.Size([32]), [1, 0, 1, 0])
    """
    if is_plain_cpu(x) and x.is_contiguous():
        return _pack_in_cpp(x)
    return (_pack if is_plain(x) else _pack_op)(x)


def unpack_mask(packed: Tensor, numel: int) -> Tensor:
    """The inverse of `pack_mask`.

    Args:
        packed: uint8, [ceil(numel / 256) * 32].
        numel: Number of elements to return.

    Returns:
        bool, [numel].

    Raises:
        ValueError: If `packed` is not what `numel` elements were packed to.

    Example:
        >>> unpack_mask(pack_mask(torch.tensor([True, False, True])), 3)
        tensor([ True, False,  True])
    """
    return (_unpack if is_plain(packed) else _unpack_op)(packed, numel)


def pack_reference(x: Tensor) -> Tensor:
    """`pack_mask` in plain torch: the definition."""
    return bits.pack(bits.blocks(x != 0, BLOCK), 1).view(-1)


def unpack_reference(packed: Tensor, numel: int) -> Tensor:
    """`unpack_mask` in plain torch: the definition."""
    return bits.unpack(packed.view(-1, BLOCK // 8), 1).reshape(-1)[:numel] != 0


def _n_bytes(numel: int) -> int:
    return (numel + BLOCK - 1) // BLOCK * (BLOCK // 8)


def _empty_packed(x: Tensor) -> Tensor:
    if x.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"dtype {x.dtype}; allowed: torch.bool, torch.uint8")
    return x.new_empty(_n_bytes(x.numel()), dtype=torch.uint8)


def _pack(x: Tensor) -> Tensor:
    chosen = choose(x)
    if chosen == "cpu":
        return _pack_in_cpp(x.reshape(-1).contiguous())
    packed = _empty_packed(x)
    if chosen == "reference":
        return pack_reference(x)
    from memtrain.kernels.packing import mask_triton

    mask_triton.pack(x.reshape(-1).contiguous().view(torch.uint8), packed)
    return packed


def _pack_in_cpp(x: Tensor) -> Tensor:
    packed = _empty_packed(x)
    run, pack = cpu.packed("mt_pack_mask", 4)
    run(pack(x.data_ptr(), packed.data_ptr(), x.numel(), torch.get_num_threads()))
    return packed


def _empty_mask(packed: Tensor, numel: int) -> Tensor:
    if packed.shape != (_n_bytes(numel),) or packed.dtype != torch.uint8:
        raise ValueError(
            f"packed is {packed.dtype} {tuple(packed.shape)}; {numel} elements need uint8 "
            f"{(_n_bytes(numel),)}"
        )
    return packed.new_empty(numel, dtype=torch.bool)


def _unpack(packed: Tensor, numel: int) -> Tensor:
    mask = _empty_mask(packed, numel)
    chosen = choose(packed)
    if chosen == "reference":
        return unpack_reference(packed.contiguous(), numel)
    packed = packed.contiguous()
    if chosen == "triton":
        from memtrain.kernels.packing import mask_triton

        mask_triton.unpack(packed, mask.view(torch.uint8))
    else:
        cpu.call("mt_unpack_mask", packed, mask, numel)
    return mask


_pack_op = register("pack_mask(Tensor x) -> Tensor", _pack, _empty_packed)
_unpack_op = register("unpack_mask(Tensor packed, int numel) -> Tensor", _unpack, _empty_mask)

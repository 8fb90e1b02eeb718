"""One step of SGD, Lion or AdamW over many tensors at once, with block-quantised states."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import block
from memtrain.kernels.dispatch import choose
from memtrain.kernels.step import entries
from memtrain.kernels.step import scalars as numbers
from memtrain.kernels.step.cuda_graph import Kept
from memtrain.kernels.step.entries import FLOAT_TYPES
from memtrain.kernels.step.scalars import SGD, Hyper, Lion
from memtrain.kernels.step.split import PLAIN, Beside

RULES = {"adamw": 2, "sgd": 1, "lion": 1}  # and how many states each keeps
_NUMBERS = {"adamw": Hyper, "sgd": SGD, "lion": Lion}
BLOCKS = {4: 128, 8: 256}  # bits -> elements a scale
EXACT = 32
NONE = 0  # bits of SGD without momentum
MAPS8 = ("DE", "DE-0")  # of 8 bits: what `buckets` serves
_LOWEST = 0x32800000 >> 16  # 2**-26, below every bound but 0's: the first bucket
_BUCKETS = 26 * 128 + 2


class Entry(NamedTuple):
    """One parameter's part of a step; the payloads and the parameter are written in place.

    `states` are the rule's (AdamW: both moments; SGD, Lion: the momentum), each in blocks of
    `BLOCKS[bits]` (`{"codes", "scale"}`), signed but for AdamW's second moment; or, with 32
    `bits`, `{"tensor": float32}` (SGD and Lion; `adamw` has the exact AdamW); or, with 0
    `bits`, none (SGD without momentum). `numbers` are on the host, or a row of `numbers.on_device`;
    `beside` is as in `kernels.step.adamw`.
    """

    param: Tensor
    grad: Tensor
    states: tuple[Mapping[str, Tensor], ...]
    rule: str
    bits: int
    numbers: Hyper | SGD | Lion | Tensor
    maps: tuple[str, ...] = ("DE", "DE")
    beside: Beside = PLAIN


def block_step(given: Sequence[Entry], kept: Kept | None = None) -> None:
    """Decompress the states, take one step, compress them again: for all entries.

    The step uses the new states before they are quantised, in float32, and rounds the new
    parameter once, to the nearest value of its dtype. One C++ call (CPU), or one launch for each
    rule, width and pair of dtypes (CUDA), serves all contiguous parameters of float32, bfloat16
    and float16 with gradients of any of these; other layouts and float64 take the reference's
    arithmetic, one parameter at a time. A gradient whose strides differ from its parameter's is
    copied first.

    NaN and Inf in a gradient reach the parameter as in torch, and stay in the states of the
    element's block. Lion's sign of NaN is NaN.

    Args:
        given: What to update. Parameters without elements are skipped.
        kept: Of steps that a CUDA graph may capture; their numbers are on the device.

    Memory:
        No temporaries in the C++ and Triton forms, besides a table of a few hundred bytes for
        each tensor.

    Raises:
        ValueError: If a rule, its width or its map is unknown; nothing was changed then.

    Example:
        >>> from memtrain.kernels.step.scalars import sgd
        >>> p, g, buffer = torch.ones(2), torch.ones(2), {"tensor": torch.zeros(2)}
        >>> block_step([Entry(p, g, (buffer,), "sgd", 32, sgd(lr=0.25, momentum=0.9))])
        >>> p
        tensor([0.7500, 0.7500])

    Reference:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861;
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
    """
    for entry in given:
        _check(entry)
    together = entries.gather(given, step_reference)
    if not together:
        return
    if choose(together[0].param) == "cpu":
        # Every tensor of `rows`, `alive` must outlive the call: C++ sees only addresses.
        rows, alive = table(together)
        cpu.call("mt_blockstep", rows, len(together))
        del alive
    else:
        from memtrain.kernels.step import blockstep_triton

        blockstep_triton.step(together, kept)


def _check(entry: Entry) -> None:
    rule, bits = entry.rule, entry.bits
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; allowed: {', '.join(RULES)}")
    allowed = (8,) if rule == "adamw" else (EXACT, *BLOCKS)
    allowed += (NONE,) if rule == "sgd" else ()
    if bits not in allowed:
        raise ValueError(
            f"rule {rule!r} has no {bits} bits; allowed: {', '.join(map(str, allowed))}"
        )
    for k, name in enumerate(entry.maps[: RULES[rule]]):
        if bits == 4:
            block.codebook(name, bits=4, signed=_signed(k))
        if bits == 8 and name not in MAPS8:
            raise ValueError(f"map {name!r} has no fast encoder; allowed: {', '.join(MAPS8)}")
    entries.check_sizes(entry, [(state, _sizes(bits, entry.param)) for state in entry.states])


def _sizes(bits: int, param: Tensor) -> dict[str, int]:
    """Elements of what a state keeps."""
    if bits == EXACT:
        return {"tensor": param.numel()}
    n_blocks = -(-param.numel() // BLOCKS[bits])
    return {"codes": n_blocks * BLOCKS[bits] * bits // 8, "scale": n_blocks}


def step_reference(entry: Entry) -> None:
    """One entry of `block_step` in pure torch."""
    new = entries.read(entry)
    work = new.dtype
    h = numbers.known(_NUMBERS[entry.rule], entry.numbers)
    g = entry.grad.to(work) * h.sign
    g = numbers.where(h.l2, lambda: g + h.l2 * new, g)
    if entry.bits == NONE:
        states = [torch.zeros_like(g)]
    else:
        states = [_decode(entry, k).to(work) for k in range(RULES[entry.rule])]
    new, states = _advance(new, g, states, h)
    entries.write(entry, new)
    if entry.bits != NONE:
        for k, state in enumerate(states):
            _encode(entry, k, state)


def _advance(
    p: Tensor, g: Tensor, states: list[Tensor], h: Hyper | SGD | Lion
) -> tuple[Tensor, list[Tensor]]:
    m = states[0]
    if isinstance(h, Hyper):
        m = m + h.w1 * (g - m)
        v = h.b2 * states[1] + (h.w2 * g) * g
        return p * h.decay - (h.step_size * m) / (v.sqrt() + h.eps), [m, v]
    if isinstance(h, SGD):
        m = h.keep * m + h.take * g
        return p - h.lr * numbers.where(h.nesterov, lambda: g + h.nesterov * m, m), [m]
    c = h.b1 * m + h.w1 * g
    step = torch.where(c.isnan(), c, c.sign())
    return p * h.decay - h.lr * step, [h.b2 * m + h.w2 * g]


def _signed(k: int) -> bool:
    return k == 0


def _decode(entry: Entry, k: int) -> Tensor:
    state = entry.states[k]
    if entry.bits == EXACT:
        return state["tensor"]
    flat = block.dequantize_reference(
        state["codes"], state["scale"], entry.maps[k], entry.bits, _signed(k), entry.param.numel()
    )
    return flat.view(entry.param.shape)


def _encode(entry: Entry, k: int, new: Tensor) -> None:
    state = entry.states[k]
    if entry.bits == EXACT:
        state["tensor"].copy_(new)
        return
    codes, scale = block.quantize_reference(
        new, entry.maps[k], entry.bits, _signed(k), BLOCKS[entry.bits]
    )
    state["codes"].copy_(codes)
    state["scale"].copy_(scale)


@cache
def book(map: str, bits: int, signed: bool, device: torch.device) -> Tensor:
    """What the kernels read of a map: float32, 2**bits values, the bounds between them, +Inf."""
    end = torch.tensor([float("inf")], device=device)
    bounds = block.midpoints(map, bits, signed, device)
    return torch.cat([block.qmap(map, bits, signed, device), bounds, end])


@cache
def buckets(map: str, signed: bool) -> Tensor:
    """How many bounds of an 8-bit map lie below each bucket of float32 values.

    A bucket holds the magnitudes that share sign, exponent and 7 bits of mantissa; from 2**-26 on
    it holds at most one bound, so one compare with the next bound finds a value's code. Edges
    are moved out by 2**-20: the bucket may be that of a rounded value.

    Args:
        map: `"DE"` or `"DE-0"`.
        signed: Which form of the map.

    Returns:
        uint8, [2 * n + 4]: n buckets of positive values, n of negative ones, and 4 bytes that a
        load of 32 bits may touch.

    Example:
        >>> buckets("DE", True).unique().numel() > 250
        True
    """
    bounds = block.midpoints(map, 8, signed, torch.device("cpu")).double()
    bits = torch.arange(_LOWEST, _LOWEST + _BUCKETS + 1, dtype=torch.int32) << 16
    edges = bits.view(torch.float32).double()
    edges[0] = 0.0
    above = torch.searchsorted(bounds, edges[:-1] * (1 - 2.0**-20))
    below = torch.searchsorted(bounds, -edges[1:] * (1 + 2.0**-20))
    return torch.cat([above, below, torch.zeros(4)]).to(torch.uint8)


def table(given: Sequence[Entry], *, on_device: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The kernels' table, int64 [n, 20] (`BlockRow` of cpu/step/blockstep.cpp), and what it needs.

    Args:
        given: With contiguous parameters and gradients.
        on_device: Whether the Triton kernels read it (`Beside.device_fields`).

    Returns:
        The table, on the CPU, and the tensors that must outlive its use.
    """
    device = given[0].param.device
    each = numbers.together([entry.numbers for entry in given], device)
    kept, rows = [each], []
    for i, entry in enumerate(given):
        row = [entry.param.data_ptr(), entry.grad.data_ptr()]
        for k in range(2):
            row += _state_pointers(entry, k, device)
        row += [each.data_ptr() + 32 * i, entry.param.numel(), list(RULES).index(entry.rule)]
        row += [entry.bits, FLOAT_TYPES[entry.param.dtype], FLOAT_TYPES[entry.grad.dtype]]
        beside = entry.beside.device_fields() if on_device else entry.beside.fields()
        rows.append([*row, *beside])
        kept.append(entry.grad)
    return torch.tensor(rows, dtype=torch.int64), kept


def _state_pointers(entry: Entry, k: int, device: torch.device) -> list[int]:
    """Codes (or the state), scales, the book, and the buckets of the C++ encoder."""
    if k >= len(entry.states):
        return [0, 0, 0, 0]
    if entry.bits == EXACT:
        return [entry.states[k]["tensor"].data_ptr(), 0, 0, 0]
    state, map = entry.states[k], entry.maps[k]
    starts = buckets(map, _signed(k)).data_ptr() if entry.bits == 8 else 0
    values = book(map, entry.bits, _signed(k), device).data_ptr()
    return [state["codes"].data_ptr(), state["scale"].data_ptr(), values, starts]

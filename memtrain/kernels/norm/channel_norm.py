"""Norms over channels (batch, group, instance) whose normalised input is only ever codes.

Contract, reference and dispatch of two ops: from an input and its statistics to the codes of
`x_hat`, and from the codes and an output's gradient to those of the input, weight and bias. The
composition (torch's norm again, or its backward, around `group_quantize`) writes and reads a whole
`x_hat` each time.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend_of, choose, is_plain, is_plain_cpu, register
from memtrain.kernels.group import group
from memtrain.kernels.norm.norm import Codes
from memtrain.kernels.random.philox import signed


class Channels(NamedTuple):
    """Where the channels lie in memory: [outer, middle, channels, inner], each of any size.

    A statistic serves `together` neighbouring channels of one of the `outer` parts, so that there
    are `outer * channels / together` of them. A batch norm of [N, C, H, W] has (1, N, C, H * W),
    (1, N * H * W, C, 1) where channels are last; a group norm (N, 1, C, H * W, C / groups).
    """

    outer: int
    middle: int
    channels: int
    inner: int
    together: int = 1


def fits(x: Tensor, where: Channels, group_size: int) -> bool:
    """Whether the two ops serve a tensor better than the composition.

    Args:
        x: The norm's input.
        where: Its channels.
        group_size: Of the quantiser.

    Returns:
        True where a kernel knows the dtype on its device, groups are whole eights, and channels
        that each have statistics of their own have 16 elements or more.

    Example:
        >>> x = torch.ones(2, 3, 4, 4)
        >>> fits(x, Channels(1, 2, 3, 16), 256), fits(x.double(), Channels(1, 2, 3, 16), 256)
        (True, False)
    """
    known = backend_of(x) in ("cpu", "triton") and x.dtype in cpu.FLOAT_TYPES
    runs = where.middle > 1 or where.inner >= 16
    return known and runs and group_size % 8 == 0 and x.numel() > 0


def channel_norm_quantize(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    where: Channels,
    codes: Codes = Codes(),  # noqa: B008 (a frozen value)
) -> tuple[Tensor, Tensor]:
    """The codes of `x_hat = (x - mean) * rstd`, in float32, without `x_hat` as a tensor.

    Args:
        x: float32, bfloat16 or float16, contiguous: the elements in memory order.
        mean: float32, [statistics].
        rstd: float32, [statistics].
        where: The channels.
        codes: How x_hat is quantised; groups begin anew nowhere, they span channels and samples.

    Returns:
        codes: As of `group_quantize(x_hat)`.
        bounds: As of `group_quantize(x_hat)`.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If a size does not fit, or the seed of `codes` has more than 64 bits.

    Memory:
        bits / 8 + 4 / group_size bytes per element.

    Example:
        >>> x, two = torch.tensor([1.0, 3, 1, 3, 4, 8, 4, 8]), torch.tensor([2.0, 6.0])
        >>> where = Channels(1, 1, 2, 4)
        >>> options = Codes(bits=1, group_size=8, stochastic=False)
        >>> codes, bounds = channel_norm_quantize(x, two, 2 / two, where, options)
        >>> codes.tolist(), bounds.tolist()  # 0, 1, 0, 1, ...
        ([[170]], [[-1.0, 1.0]])
    """
    bits, group_size, seed, *how = codes
    seed = signed(seed)
    if x.dtype in cpu.FLOAT_TYPES and is_plain_cpu(x):
        return bound(x.dtype, where, codes)(x, mean, rstd, seed)
    run = _quantize if is_plain(x) else _quantize_op
    return run(x, mean, rstd, *where, bits, group_size, seed, *how)


def bound(
    dtype: torch.dtype, where: Channels, codes: Codes
) -> Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]:
    """`channel_norm_quantize` of plain tensors of one form on the CPU: it serves while ordinary.

    Args:
        dtype: Of the input.
        where: As for `channel_norm_quantize`.
        codes: The same; the seed does nothing.

    Returns:
        `(x, mean, rstd, seed)` -> codes and bounds.
    """
    bits, group_size, _, stochastic, wide = codes
    return _quantizer(dtype, where, bits, group_size, stochastic, wide)


def channel_norm_backward(  # noqa: PLR0913 (a tensor's places, and a payload's)
    dy: Tensor,
    codes: Tensor,
    bounds: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    where: Channels,
    bits: int,
    group_size: int,
    *,
    needs_dx: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """A norm's gradients from the codes of its normalised input, a tile of which lives at a time.

    With g = dy * weight, means over the elements of a statistic, and `h = x_hat - mean(x_hat)`,
    `dx = rstd * (g - mean(g) - h * mean(g * h))`, `dweight = sum(dy * h)` and `dbias = sum(dy)`
    over the elements of a channel. A norm's x_hat has a mean of 0. That of its codes is noise: it
    would send a share of mean(g) into dx, and give sum(dx), which is 0 by nature, a size. Two
    passes over `dy` and the codes: one for the sums, whose parts are added in float64, and one for
    dx, in float32. The number of threads changes nothing. A NaN or an Inf spoils its own channels'
    gradients.

    Args:
        dy: float32, bfloat16 or float16, contiguous: the elements in memory order.
        codes: Of `channel_norm_quantize`.
        bounds: Of `channel_norm_quantize`.
        rstd: float32, [statistics].
        weight: float32, [channels], or None for ones.
        where: The channels.
        bits: Of the codes.
        group_size: Of the codes.
        needs_dx: Whether dx is asked for; the sums are made in any case.

    Returns:
        dx: As `dy`; no elements where it is not asked for.
        dweight: float32, [channels].
        dbias: float32, [channels].

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If a size does not fit.

    Memory:
        dx, and up to a sixteenth of dy's bytes for sums.

    Example:
        >>> where, rstd = Channels(1, 2, 2, 2), torch.ones(2)
        >>> x_hat = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
        >>> payload = group.group_quantize(x_hat, 1, 8)
        >>> dy = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
        >>> dx, dw, db = channel_norm_backward(dy, *payload, rstd, None, where, 1, 8)
        >>> dx.tolist(), dw.tolist(), db.tolist()
        ([0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0], [1.0, 0.0])
    """
    run = _backward if is_plain(dy) else _backward_op
    return run(dy, codes, bounds, rstd, weight, *where, bits, group_size, needs_dx)


def _check(x: Tensor, statistics: dict[str, Tensor], where: Channels) -> None:
    if x.dtype not in cpu.FLOAT_TYPES:
        raise TypeError(f"dtype {x.dtype}; allowed: float32, bfloat16, float16")
    sizes = where.outer * where.middle * where.channels * where.inner
    if not x.is_contiguous() or x.numel() != sizes:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()}; allowed: contiguous, "
            f"the {sizes} elements of {where}"
        )
    if where.together < 1 or where.channels % where.together:
        raise ValueError(f"{where.channels} channels; allowed: multiples of {where.together}")
    for name, statistic in statistics.items():
        needed = where.channels
        if name != "weight":
            needed = where.outer * where.channels // where.together
        if statistic.dtype != torch.float32:
            raise TypeError(f"{name} of dtype {statistic.dtype}; allowed: float32")
        if statistic.numel() != needed or not statistic.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(statistic.shape)}; allowed: {needed} contiguous elements"
            )


# Of an op's integers the first are `Channels`, since a schema has no tuples of names.


def _empty_codes(x: Tensor, mean: Tensor, rstd: Tensor, *options: int) -> tuple[Tensor, Tensor]:
    _check(x, {"mean": mean, "rstd": rstd}, Channels(*options[:5]))
    return group._empty(x, *options[5:])  # pyright: ignore[reportArgumentType]


def _quantize(x: Tensor, mean: Tensor, rstd: Tensor, *options: int) -> tuple[Tensor, Tensor]:
    where, codes = Channels(*options[:5]), Codes(*options[5:])  # pyright: ignore
    packed, bounds = _empty_codes(x, mean, rstd, *options)
    chosen = choose(x)
    if chosen == "reference":
        return quantize_reference(x, mean, rstd, where, codes)
    if chosen == "triton":
        from memtrain.kernels.norm import channel_norm_triton

        channel_norm_triton.quantize(x, mean, rstd, packed, bounds, where, codes)
        return packed, bounds
    cpu.call(
        "mt_channel_norm_quantize", x, cpu.FLOAT_TYPES[x.dtype], mean, rstd, packed, bounds,
        int(codes.wide), *where, codes.bits, codes.group_size, codes.seed, int(codes.stochastic),
    )  # fmt: skip
    return packed, bounds


@lru_cache(maxsize=4096)
def _quantizer(
    dtype: torch.dtype, where: Channels, bits: int, group_size: int, stochastic: bool, wide: bool
) -> Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]:
    """The C++ kernel for tensors of a dtype and of one form: as `_quantize`."""
    group._check(bits, group_size, dtype)
    outer, middle, channels, inner, together = where
    n = outer * middle * channels * inner
    whole = together > 0 and channels % together == 0
    count = outer * channels // together if whole else -1
    n_groups, width = (n + group_size - 1) // group_size, group_size * bits // 8
    kept, kind = group._bounds_dtype(wide), cpu.FLOAT_TYPES[dtype]
    kernel = cpu.function("mt_channel_norm_quantize", "pipppp" + "i" * 10)

    def run(x: Tensor, mean: Tensor, rstd: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        usual = x.numel() == n and x.is_contiguous()
        usual = usual and mean.dtype is rstd.dtype is torch.float32
        usual = usual and mean.numel() == rstd.numel() == count
        if not (usual and mean.is_contiguous() and rstd.is_contiguous()):
            _check(x, {"mean": mean, "rstd": rstd}, where)
        codes = x.new_empty(n_groups, width, dtype=torch.uint8)
        bounds = x.new_empty(n_groups, 2, dtype=kept)
        places = x.data_ptr(), kind, mean.data_ptr(), rstd.data_ptr(), codes.data_ptr()
        how = bits, group_size, seed, stochastic, torch.get_num_threads()
        kernel(*places, bounds.data_ptr(), wide, *where, *how)
        return codes, bounds

    return run


def _empty_gradients(
    dy: Tensor, codes: Tensor, bounds: Tensor, rstd: Tensor, weight: Tensor | None, *options: int
) -> tuple[Tensor, Tensor, Tensor]:
    where, (bits, group_size, needs_dx) = Channels(*options[:5]), options[5:]
    _check(dy, {"rstd": rstd} | ({} if weight is None else {"weight": weight}), where)
    group._check(bits, group_size, dy.dtype)
    group._check_payload(codes, bounds, bits, group_size, dy.numel())
    dx = torch.empty_like(dy) if needs_dx else dy.new_empty(0)
    return dx, rstd.new_empty(where.channels), rstd.new_empty(where.channels)


def _backward(
    dy: Tensor, codes: Tensor, bounds: Tensor, rstd: Tensor, weight: Tensor | None, *options: int
) -> tuple[Tensor, Tensor, Tensor]:
    where, (bits, group_size, needs_dx) = Channels(*options[:5]), options[5:]
    dx, dweight, dbias = _empty_gradients(dy, codes, bounds, rstd, weight, *options)
    if dy.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    codes, bounds = codes.contiguous(), bounds.contiguous()
    chosen = choose(dy)
    if chosen == "reference":
        numbers = (bits, group_size, dy.numel(), torch.float32)
        x_hat = group.dequantize_reference(codes, bounds, *numbers)
        full, dweight, dbias = backward_reference(dy, x_hat, rstd, weight, where)
        return full.to(dy.dtype) if needs_dx else dx, dweight, dbias
    if chosen == "triton":
        from memtrain.kernels.norm import channel_norm_triton

        payload = (codes, bounds)
        sums, mean = centred(channel_norm_triton.sums(dy, *payload, where, bits, group_size), where)
        if needs_dx:
            lines = [t.contiguous() for t in lines_of(sums, mean, rstd, weight, where)]
            channel_norm_triton.gradient(dy, dx, *payload, lines, where, bits, group_size)
        dbias, dweight = sums.sum(1).float()
        return dx, dweight, dbias
    wide = int(bounds.dtype == torch.float32)
    out = dx if needs_dx else None
    cpu.call(
        "mt_channel_norm_backward", dy, out, cpu.FLOAT_TYPES[dy.dtype], codes, bounds, wide, rstd,
        weight, dbias, dweight, *where, bits, group_size,
    )  # fmt: skip
    return dx, dweight, dbias


def _sums_nbytes(  # noqa: PLR0913 (a tensor's places, and a payload's)
    dy: Tensor,
    codes: Tensor,
    bounds: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    outer: int,
    middle: int,
    channels: int,
    inner: int,
    *rest: int,
) -> int:
    """Bytes of the sums of parts, and of all: float64, as `channel_norm_backward.cpp` cuts them."""
    span = middle * channels * inner
    parts = span // max(32768, 96 * channels, span // 64) if middle > 1 else 0
    return 24 * outer * channels * (max(parts, middle > 1) + 1)


def _spread_on_cuda(x: Tensor, mean: Tensor, rstd: Tensor, *options: int) -> int:
    """Bytes of the statistics of channels that share theirs: each has its own for Triton."""
    where = Channels(*options[:5])
    return 8 * where.outer * where.channels if where.together > 1 else 0


def tile_of_sums(where: Channels) -> tuple[bool, int, int]:
    """Whether a program of Triton's sums lies across channels; its elements beside, and its rows.

    Example:
        >>> tile_of_sums(Channels(1, 32, 64, 3136)), tile_of_sums(Channels(1, 100352, 64, 1))
        ((False, 1024, 1), (True, 64, 8))
    """
    across = where.inner == 1 and where.channels > 1
    most, size = (64, where.channels) if across else (1024, where.inner)
    block = min(most, 1 << (size - 1).bit_length())
    return across, block, (512 if across else 1024) // block


def programs_of_sums(where: Channels) -> tuple[int, int]:
    """Programs of Triton's sums beside each other, and how many add up parts of one channel.

    Enough for a GPU, and no more bytes of sums than an eighth of what is read.

    Example:
        >>> programs_of_sums(Channels(1, 100352, 64, 1))
        (1, 1024)
    """
    across, block, rows = tile_of_sums(where)
    programs = where.outer * (-(-where.channels // block) if across else where.channels)
    return programs, max(1, min(-(-where.middle // (6 * rows)), -(-1024 // max(1, programs))))


def _held_on_cuda(
    dy: Tensor, codes: Tensor, bounds: Tensor, rstd: Tensor, weight: Tensor | None, *options: int
) -> int:
    """Bytes of the sums of parts in float32 and float64, of `centred` or of `lines_of`."""
    where, needs_dx = Channels(*options[:5]), options[-1]
    each = where.outer * where.channels
    statistics = each // where.together
    _, splits = programs_of_sums(where)
    sums, center = (36 * splits + 24) * each, 56 * each + 8 * statistics
    lines = (24 if weight is None else 40) * each + 64 * statistics if needs_dx else 0
    return max(sums, center, lines)


def quantize_reference(
    x: Tensor, mean: Tensor, rstd: Tensor, where: Channels, codes: Codes
) -> tuple[Tensor, Tensor]:
    """`channel_norm_quantize` in plain torch: the definition."""
    x_hat = (_spread(x.float(), where) - _of_channels(mean, where)) * _of_channels(rstd, where)
    return group.quantize_reference(
        x_hat, codes.bits, codes.group_size, codes.seed, codes.stochastic, codes.wide
    )


def backward_reference(
    dy: Tensor, x_hat: Tensor, rstd: Tensor, weight: Tensor | None, where: Channels
) -> tuple[Tensor, Tensor, Tensor]:
    """`channel_norm_backward` in plain torch, from the decoded `x_hat`: the definition."""
    shape, dy, x_hat = dy.shape, _spread(dy.float(), where), _spread(x_hat, where)
    sums = torch.stack([t.double().sum((1, 3)) for t in (dy, dy * x_hat, x_hat)])
    sums, mean = centred(sums, where)
    scale, slope, shift = (t[:, None, :, None] for t in lines_of(sums, mean, rstd, weight, where))
    dbias, dweight = sums.sum(1).float()
    return (scale * dy + (slope * x_hat + shift)).view(shape), dweight, dbias


def centred(sums: Tensor, where: Channels) -> tuple[Tensor, Tensor]:
    """Sums of an x_hat less its mean.

    Args:
        sums: Of dy, dy * x_hat and x_hat, float64, [3, outer, channels].
        where: The channels.

    Returns:
        sums: Of dy and of dy * (x_hat - mean), [2, outer, channels].
        mean: Of x_hat, [outer, statistics].
    """
    count = where.middle * where.inner * where.together
    mean = sums[2].unflatten(1, (-1, where.together)).sum(2) / count
    of_channels = mean.repeat_interleave(where.together, 1)
    return torch.stack([sums[0], sums[1] - of_channels * sums[0]]), mean


def lines_of(
    sums: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, where: Channels
) -> tuple[Tensor, Tensor, Tensor]:
    """`dx = scale * dy + (slope * x_hat + shift)`, float32, [outer, channels] each.

    Args:
        sums: Of dy and of dy * (x_hat - mean), float64, [2, outer, channels].
        mean: Of x_hat, float64, [outer, statistics].
        rstd: [statistics].
        weight: [channels], or None.
        where: The channels.
    """
    each = rstd.reshape(where.outer, -1)
    g = sums if weight is None else sums * weight
    count = where.middle * where.inner * where.together
    shared = g.unflatten(2, (-1, where.together)).sum(3)
    shift, slope = -each * shared / count
    lines = torch.stack([shift - slope * mean, slope])
    shift, slope = lines.float().repeat_interleave(where.together, 2)
    scale = each.repeat_interleave(where.together, 1)
    return scale if weight is None else scale * weight, slope, shift


def _spread(x: Tensor, where: Channels) -> Tensor:
    return x.view(where[:4])


def _of_channels(statistic: Tensor, where: Channels) -> Tensor:
    """One number for each channel of each outer part: [outer, 1, channels, 1]."""
    each = statistic.reshape(where.outer, -1).repeat_interleave(where.together, 1)
    return each[:, None, :, None]


_quantize_op = register(
    "channel_norm_quantize(Tensor x, Tensor mean, Tensor rstd, int outer, int middle, int channels,"
    " int inner, int together, int bits, int group_size, int seed, bool stochastic, bool wide)"
    " -> (Tensor, Tensor)",
    _quantize,
    _empty_codes,
    inside_cuda=_spread_on_cuda,
)
_backward_op = register(
    "channel_norm_backward(Tensor dy, Tensor codes, Tensor bounds, Tensor rstd, Tensor? weight,"
    " int outer, int middle, int channels, int inner, int together, int bits, int group_size,"
    " bool needs_dx) -> (Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
    inside=_sums_nbytes,
    inside_cuda=_held_on_cuda,
)

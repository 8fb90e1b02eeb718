"""What each compressor states of its error: the value that an element should have, and how far it
may be off (inf: anything)."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from memtrain.kernels.codebook import lloyd_max as lloyd
from memtrain.kernels.codebook.values import codebook
from memtrain.kernels.dispatch import backend

BF16_MAX = torch.finfo(torch.bfloat16).max
U = 2.0**-24  # half a unit in float32's last place


def last_place(dtype, magnitude):
    """The error of rounding numbers up to `magnitude` to `dtype`."""
    info = torch.finfo(dtype)
    return info.eps / 2 * magnitude + info.smallest_normal * info.eps


def outward_error(lo, hi, ends):
    """How far an end lies from what it is rounded outwards to."""
    magnitude = torch.maximum(lo.abs(), hi.abs())
    return 2 * last_place(ends, magnitude) if ends != torch.float32 else 0 * magnitude


def range_error(lo, hi, parts, share, dtype, ends):
    """`share` of a `parts`-th of the range between ends that were rounded outwards to `ends`."""
    magnitude, outwards = torch.maximum(lo.abs(), hi.abs()), outward_error(lo, hi, ends)
    step = (hi - lo + 2 * outwards) / parts
    arithmetic = U * (8 * (hi - lo) + 4 * magnitude) + 2.0**-100
    return share * step + arithmetic + last_place(dtype, magnitude + outwards)


def grouped(rows, length, bits, compressor, dtype):
    """Target and error of rows in groups; `bits` of each row."""
    n, size = rows.shape
    rows = rows.float().double()
    bad_size = -size % length
    padded = torch.cat([rows, rows[:, -1:].expand(n, bad_size)], 1) if size else rows
    groups = padded.view(n, padded.shape[1] // length, length)
    clean, target = groups.isfinite(), groups
    if groups.numel():
        lo, hi = (
            reduce(groups.where(clean, end), 2, keepdim=True).clamp(-BF16_MAX, BF16_MAX)
            for reduce, end in ((torch.amin, math.inf), (torch.amax, -math.inf))
        )
        target = groups.nan_to_num(-math.inf).maximum(lo).minimum(hi)
        target = target.where(clean.any(2, keepdim=True), torch.nan)
        share = 0.5 if compressor.rounding == "nearest" else 1.0
        parts = (2.0**bits - 1).view(n, 1, 1)
        error = range_error(lo, hi, parts, share, dtype, torch.bfloat16)
        # What is not finite decodes to a bound itself, wherever the steps between them lie.
        error = torch.where(clean, error, error + outward_error(lo, hi, torch.bfloat16))
    else:
        error = torch.zeros_like(groups)
    return target.flatten(1)[:, :size], error.flatten(1)[:, :size]


def group(compressor, x, packed, key):
    bits = torch.tensor([compressor.bits], dtype=torch.float64)
    return grouped(x.reshape(1, -1), compressor.group_size, bits, compressor, x.dtype)


def samples(compressor, x, packed, key):
    n = x.shape[0] if x.dim() else 1
    size = math.prod(x.shape[1:])
    widths = torch.tensor(compressor.widths(n), dtype=torch.float64)
    order = packed.tensors["order"].long()
    bits = widths.new_empty(n).index_copy_(0, order, widths) if order.numel() else widths
    length = min(compressor.group_size, max(8, -(-size // 8) * 8))
    return grouped(x.reshape(n, size), length, bits, compressor, x.dtype)


def patch(compressor, x, packed, key):
    rows, columns = (1, 1, *x.shape)[-2:]
    maps = x.float().double().reshape(math.prod(x.shape[:-2]), rows, columns)
    if not maps.numel():
        return maps, maps
    kind = x.dtype if x.dtype != torch.float64 else torch.float32
    ends = torch.float16 if kind == torch.float16 else torch.bfloat16
    clean = maps.isfinite()
    inside = maps.clamp(-BF16_MAX, BF16_MAX)
    down, across = -(-rows // 4), -(-columns // 4)

    def over(values, beyond, reduce):
        """Reduce each patch and spread the result over it."""
        whole = F.pad(values, (0, -columns % 4, 0, -rows % 4), value=beyond)
        each = reduce(whole.view(-1, down, 4, across, 4), (2, 4))
        spread = each.repeat_interleave(4, 1).repeat_interleave(4, 2)
        return spread[:, :rows, :columns]

    some = over(clean.double(), 0.0, torch.amax) > 0
    lo, hi = (
        over(inside.where(clean, end), end, reduce)
        for end, reduce in ((math.inf, torch.amin), (-math.inf, torch.amax))
    )
    target = inside.nan_to_num(-math.inf).maximum(lo).minimum(hi)
    share = 0.5 if compressor.rounding == "nearest" else 1.0
    error = range_error(lo, hi, 3, share, kind, ends if kind == torch.float32 else torch.float32)
    # both levels around a value were rounded
    error = error + 2 * last_place(kind, torch.maximum(lo.abs(), hi.abs()))
    # what is not finite decodes to a bound, which was rounded outwards
    error = torch.where(clean, error, error + outward_error(lo, hi, torch.bfloat16))
    return torch.where(some, target, torch.nan), error


def coded(x, scale, compressor, lost=0.0, sign=1.0):
    """The values of a map times `scale` and `sign`: the nearest one, or one of the two around."""
    values = codebook(compressor.map, bits=compressor.bits, signed=compressor.signed)
    book = torch.tensor(values, dtype=torch.float64)
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(values)], dtype=torch.float64)
    target = x.float().double() * sign
    at = (target / scale.where(scale > 0, 1)).contiguous()
    error = (target - book[torch.searchsorted(middle, at)] * scale).abs()
    if getattr(compressor, "rounding", "nearest") == "stochastic":
        above = torch.searchsorted(book, at).clamp(max=len(book) - 1)
        below = (above - 1).clamp(min=0)
        both = torch.stack([book[above] * scale, book[below] * scale])
        error = (target - both).abs().amax(0)
    # Reciprocals are rounded, and 0 for subnormal maxima.
    error = error + 16 * U * scale + 2 * torch.finfo(torch.float32).tiny + lost
    error = error + last_place(x.dtype, scale)
    return target * sign, torch.where(scale.isfinite(), error, math.inf)


def block(compressor, x, packed, key, size=None):
    size, flat = size or compressor.block_size, x.reshape(-1)
    blocks = F.pad(flat.float(), (0, -flat.numel() % size)).view(-1, size)
    scale = blocks.abs().amax(1) if len(blocks) else blocks.new_zeros(0)
    # The first element of the largest magnitude is the scale, with its sign.
    first = (blocks.abs() == scale.unsqueeze(1)).byte()
    first = blocks.gather(1, first.argmax(1, keepdim=True)).squeeze(1) if len(blocks) else scale
    sign = 1.0 - 2.0 * (first < 0).double() * compressor.signed
    scale, sign = (each.double().repeat_interleave(size)[: flat.numel()] for each in (scale, sign))
    return coded(flat, scale, compressor, sign=sign)


def rank1(compressor, x, packed, key):
    if x.dim() < 2:
        return block(compressor, x, packed, key, size=128)
    if not x.numel():
        return x, x
    magnitude = x.float().abs().double()
    least = torch.full_like(magnitude, math.nan)
    for dim in range(x.dim()):
        least = torch.fmin(least, finite(along(magnitude, dim)))
    return coded(x, least, compressor)


def along(magnitude, dim):
    """The maxima at each index of a dimension, over all others."""
    return magnitude.amax([d for d in range(magnitude.dim()) if d != dim], keepdim=True)


def finite(scale):
    return torch.where(scale.isfinite(), scale, math.nan)


def factored(compressor, x, packed, key):
    matrix = x.double().reshape(x.shape[0], -1) if x.numel() else x.reshape(-1)
    if not x.numel() or not matrix.isfinite().all():
        return x, torch.full_like(x, math.inf, dtype=torch.float64)
    row, col, mean = matrix.mean(1, keepdim=True), matrix.mean(0, keepdim=True), matrix.mean()
    target = row * col / mean.where(mean > 0, 1)
    least = 2.0**-149  # a mean that is subnormal has lost its last places
    lost = sum(torch.where(m > 0, least / m, 0) for m in (row, col, mean))
    error = target * (2 * U * (sum(matrix.shape) + 8) + 4 * lost) + 2 * least
    return target, error + last_place(x.dtype, target)


def derivative(compressor, x, packed, key):
    step = compressor.table()
    flushed = [0.0 if abs(b) < torch.finfo(torch.float32).tiny else b for b in step.boundaries]
    table = torch.tensor(flushed, dtype=torch.float32)
    at = x.float().abs() if step.parity == "even" else x.float()
    if step.parity == "band":
        code = ((at > table[0]) & (at <= table[1])).long()
    else:
        code = (at.unsqueeze(-1) > table).sum(-1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    levels = torch.tensor(step.levels, dtype=wide)
    return levels[code].to(x.dtype).double(), torch.zeros(x.shape, dtype=torch.float64)


def exact(compressor, x, packed, key):
    return x.double(), torch.zeros(x.shape, dtype=torch.float64)


def lloyd_max(compressor, x, packed, key):
    """The sign, and a magnitude of two for a block; over rows and columns no longer than `x`."""
    row, col = packed.tensors["row"].double(), packed.tensors["col"].double()
    if not x.numel() or not x.isfinite().all():
        return x, torch.full_like(x, math.inf, dtype=torch.float64)
    size, y = row.unsqueeze(1) * col, compressor.decompress(packed).double()
    least = y.abs() - last_place(x.dtype, y.abs())  # before it was rounded to the dtype
    pair = (x.double(), least.clamp_min(0))
    before, after = (t.reshape(size.shape) / size.where(size > 0, 1) for t in pair)
    before, after = before.where(size > 0, 0.0), after.where(size > 0, 0.0)
    blocks = [F.pad(t.flatten(), (0, -t.numel() % 128)).view(-1, 128) for t in (before, after)]
    one, other = (t.square().sum(1) for t in blocks)
    assert (other <= one * (1 + 256 * U) + 2.0**-60).all()
    scale = packed.tensors["scale"].double().repeat_interleave(128)[: x.numel()].view(size.shape)
    error = torch.maximum(x.double().abs().reshape(size.shape), lloyd.LARGE * scale * size)
    return x, error * (1 + 8 * U) + last_place(x.dtype, error) + 2.0**-149


def float_(compressor, x, packed, key):
    with backend("reference"):
        target = compressor.parsed.round(x.contiguous(), seed=key.bits()).double()
    if compressor.parsed.specials == "none":
        target = torch.where(target.isinf(), torch.nan, target)
    return target, torch.zeros_like(target)


def host(compressor, x, packed, key):
    inner = compressor.inner
    name = type(inner).__name__.lower()
    return STATED[name](inner, x, inner.compress(x, key=key), key)


STATED = {
    "identity": exact,
    "integers": exact,
    "host": host,
    "derivative": derivative,
    "group": group,
    "samples": samples,
    "block": block,
    "patch": patch,
    "rank1": rank1,
    "factored": factored,
    "lloyd_max": lloyd_max,
    "float": float_,
}

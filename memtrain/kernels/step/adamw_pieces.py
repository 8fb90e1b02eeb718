"""AdamW with a first moment of 8 bits and a factored second one: a piece at a time, in torch.

The moments are decoded and encoded by the kernels of `codebook`; the arithmetic between them is
torch's, on pieces small enough to stay in the caches.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memtrain.kernels.codebook import block
from memtrain.kernels.step import scalars
from memtrain.kernels.step.adamw import FIRST, Entry
from memtrain.kernels.step.scalars import Hyper
from memtrain.kernels.step.split import BLOCK

PIECE = (
    2**18
)  # elements, whole runs of `split.BLOCK`: 1 MiB of float32, of which some eight exist at once
PIECE_CUDA = 2**22  # of fewer launches


def step(entry: Entry) -> None:
    """`adamw.adamw_step` for one entry of kind `"factored8"` with a contiguous gradient.

    Equal to the reference but for the order of the sums of squares.

    Args:
        entry: With at least 2 dimensions.
    """
    param = entry.param.detach()
    h = scalars.known(Hyper, entry.hyper)
    piece = PIECE_CUDA if param.is_cuda else PIECE
    _new_factors(entry, h, piece)
    row, col = entry.second["row"], entry.second["col"]
    mean = row.mean()
    ratio = (row / mean).masked_fill(mean == 0, 0.0)
    for part, v in _pieces(entry, ratio, col, piece):
        _step_piece(part, h, v)


def _new_factors(entry: Entry, h: Hyper, piece: int) -> None:
    row, col = entry.second["row"], entry.second["col"]
    rows, cols = len(row), len(col)
    row_sum, col_sum = torch.empty_like(row), torch.zeros_like(col)
    each = max(1, piece // cols)
    for first in range(0, rows, each):
        last = min(rows, first + each)
        part = _between(entry, first * cols, last * cols)
        square = _gradient(part, h, _master(part)).square_().view(-1, cols)
        row_sum[first:last] = square.sum(1)
        col_sum += square.sum(0)
    row.copy_(h.b2 * row + h.w2 * (row_sum / cols))
    col.copy_(h.b2 * col + h.w2 * (col_sum / rows))


def _pieces(entry: Entry, ratio: Tensor, col: Tensor, piece: int) -> Iterator[tuple[Entry, Tensor]]:
    """Parts of an entry that begin with a block, and their second moments."""
    numel, cols = entry.param.numel(), len(col)
    for begin in range(0, numel, piece):
        end = min(numel, begin + piece)
        rows = slice(begin // cols, -(-end // cols))
        v = (ratio[rows, None] * col).view(-1)
        yield _between(entry, begin, end), v[begin - rows.start * cols :][: end - begin]


def _between(entry: Entry, begin: int, end: int) -> Entry:
    """Elements of an entry, flat; of the first moment those blocks that begin there."""
    correction, (_, size) = entry.beside.correction, FIRST["factored8"]
    own = None if correction is None else correction.view(-1)[begin:end]
    blocks = slice(-(-begin // size), -(-end // size))
    return entry._replace(
        param=entry.param.detach().view(-1)[begin:end],
        grad=entry.grad.view(-1)[begin:end],
        first={name: part[blocks] for name, part in entry.first.items()},
        beside=entry.beside._replace(correction=own, block=begin // BLOCK),
    )


def _master(part: Entry) -> Tensor:
    return part.beside.read(part.param) if part.beside.any else part.param.float()


def _gradient(part: Entry, h: Hyper, p: Tensor) -> Tensor:
    g = part.grad.float() * h.sign
    return scalars.where(h.l2, lambda: g + h.l2 * p, g)


def _step_piece(part: Entry, h: Hyper, v: Tensor) -> None:
    p = _master(part)
    g, numel = _gradient(part, h, p), part.param.numel()
    bits, size = FIRST["factored8"]
    codes, scale = part.first["codes"], part.first["scale"]
    m = block.dequantize(codes, scale, map=part.first_map, bits=bits, signed=True, numel=numel)
    m += g.sub_(m).mul_(h.w1)
    root = v.sqrt_().add_(h.eps)
    p = (p * h.decay).sub_((h.step_size * m).div_(root))
    if part.beside.any:
        part.beside.write(p, part.param)
    else:
        part.param.copy_(p)
    new = block.quantize(m, map=part.first_map, bits=bits, signed=True, block_size=size)
    codes.copy_(new[0])
    scale.copy_(new[1])

"""AdamW with a first moment of 8 bits and a factored second one: a piece at a time, in torch.

The first moment is decoded and encoded by the kernels of `codebook`; the arithmetic between them is
torch's, on pieces small enough to stay in the caches.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memtrain.kernels.codebook.quantize import dequantize_blocks, quantize_blocks
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.floats.rounding import BLOCK
from memtrain.kernels.step import update_rules
from memtrain.kernels.step.codecs import ratio
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import AdamWScalars

PIECE = 2**18
"""Elements, whole runs of `BLOCK`: 1 MiB of float32, of which some eight exist at once."""
PIECE_CUDA = 2**22
"""The same where launches cost."""


def step(entry: Entry) -> None:
    """`step.fused_step` for one entry of 8 bits and factors, with a contiguous gradient.

    Equal to the reference but for the order of the sums of squares.

    Args:
        entry: With at least 2 dimensions.
    """
    h: AdamWScalars = update_rules.named(entry.rule, entry.scalars)
    piece = PIECE_CUDA if entry.param.is_cuda else PIECE
    _new_factors(entry, h, piece)
    row, col = entry.states[1]["row"], entry.states[1]["col"]
    for part, v in _pieces(entry, ratio(row, row.mean()), col, piece):
        _step_piece(part, h, v)


def _new_factors(entry: Entry, h: AdamWScalars, piece: int) -> None:
    row, col = entry.states[1]["row"], entry.states[1]["col"]
    rows, cols = len(row), len(col)
    row_sum, col_sum = torch.empty_like(row), torch.zeros_like(col)
    each = max(1, piece // cols)
    for first in range(0, rows, each):
        last = min(rows, first + each)
        part = _between(entry, first * cols, last * cols)
        g = update_rules.gradient(h, part.grad, part.master.read(part.param))
        square = g.square_().view(-1, cols)
        row_sum[first:last] = square.sum(1)
        col_sum += square.sum(0)
    row.copy_(h.b2 * row + h.w2 * (row_sum / cols))
    col.copy_(h.b2 * col + h.w2 * (col_sum / rows))


def _pieces(
    entry: Entry, ratios: Tensor, col: Tensor, piece: int
) -> Iterator[tuple[Entry, Tensor]]:
    """Parts of an entry that begin with a block, and their second moments."""
    numel, cols = entry.param.numel(), len(col)
    for begin in range(0, numel, piece):
        end = min(numel, begin + piece)
        rows = slice(begin // cols, -(-end // cols))
        v = (ratios[rows, None] * col).view(-1)
        yield _between(entry, begin, end), v[begin - rows.start * cols :][: end - begin]


def _between(entry: Entry, begin: int, end: int) -> Entry:
    """Elements of an entry, flat; of the first moment those blocks that begin there."""
    correction, size = entry.master.correction, entry.codecs[0].block
    own = None if correction is None else correction.view(-1)[begin:end]
    blocks = slice(-(-begin // size), -(-end // size))
    first = {name: part[blocks] for name, part in entry.states[0].items()}
    return entry._replace(
        param=entry.param.detach().view(-1)[begin:end],
        grad=entry.grad.view(-1)[begin:end],
        states=(first, entry.states[1]),
        master=entry.master._replace(correction=own, block=begin // BLOCK),
    )


def _step_piece(part: Entry, h: AdamWScalars, v: Tensor) -> None:
    p, numel = part.master.read(part.param), part.param.numel()
    g = update_rules.gradient(h, part.grad, p)
    codec, codes, scale = part.codecs[0], part.states[0]["codes"], part.states[0]["scale"]
    book = Codebook(codec.codebook, codec.bits)
    m = dequantize_blocks(codes, scale, book, numel=numel)
    m += g.sub_(m).mul_(h.w1)
    root = v.sqrt_().add_(h.eps)
    part.master.write((p * h.decay).sub_((h.step_size * m).div_(root)), part.param)
    new = quantize_blocks(m, book, block_size=codec.block)
    codes.copy_(new[0])
    scale.copy_(new[1])

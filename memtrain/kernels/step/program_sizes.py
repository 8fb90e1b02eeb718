"""Sizes of the Triton step's programs and vectors, which simulated steps need without triton."""

import math

from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.dispatch import is_simulated
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS
from memtrain.kernels.step.step import Entry

ROWS, COLS = 256, 128
"""Rows and columns of a program of the first pass."""


def is_whole(entry: Entry) -> bool:
    """Whether the kernels may load 16 bytes at once: aligned tensors, rows of whole blocks.

    Example:
        >>> import torch
        >>> from memtrain.kernels.step.update_rules import sgd
        >>> p, h = torch.ones(64), sgd(lr=1.0, momentum=0.0)
        >>> is_whole(Entry(p, p, (), (), "sgd", h)), is_whole(Entry(p[:7], p[:7], (), (), "sgd", h))
        (True, False)
    """
    rows, cols = entry.matrix
    if entry.form in ROWS_AND_COLUMNS:
        # A block lies in one row; and a vector of columns follows one of rows.
        whole = cols % entry.codecs[0].block == 0 and rows % 4 == 0
    else:
        whole = rows * cols % 16 == 0
    if is_simulated():  # without addresses: what torch allocates is aligned
        return whole
    tensors = [entry.param, entry.grad, *(x for state in entry.states for x in state.values())]
    if entry.master.correction is not None:
        tensors.append(entry.master.correction)
    return whole and not any(tensor.data_ptr() % 16 for tensor in tensors)


def blocks(bits: int, whole: bool) -> int:
    """Blocks of 128 of a program of the update: what all its elements share is found once.

    Twice as many where the registers are there for 32 elements a thread.

    Args:
        bits: Of the codes; 32 where states are numbers, 0 without any.
        whole: Whether all is aligned.

    Example:
        >>> blocks(4, True), blocks(4, False), blocks(0, True)
        (32, 16, 16)
    """
    return 32 if whole and bits else 16


def elements(entry: Entry) -> int:
    """Elements of a program of the update."""
    return blocks(entry.bits, is_whole(entry)) * 128


def rows_together(entry: Entry) -> int:
    """Rows that hold whole programs of both passes: those of `Launch.rows` are multiples of them.

    Args:
        entry: Its gradient's address is not read.
    """
    cols, alone = entry.matrix[1], elements(entry._replace(grad=entry.param))
    return math.lcm(ROWS, alone // math.gcd(alone, cols))


def factored_vectors(entry: Entry) -> dict[str, int]:
    """Elements of the vectors that the passes hold for factors: partial sums, ratios of rows."""
    rows, cols = entry.matrix
    sizes = {"row_new": -(-cols // COLS) * rows, "col_new": -(-rows // ROWS) * cols}
    sizes["row_inv"] = rows
    if entry.bits == lloyd_max.BITS:
        sizes |= {"row_old": rows, "col_old": cols, "col_inv": cols}
    return sizes

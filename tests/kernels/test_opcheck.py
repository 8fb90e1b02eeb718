"""Every op registered with torch passes `opcheck`: a new one without a case fails here."""

import importlib
import pkgutil

import pytest
import torch

import memtrain.kernels
from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.flatten import flatten
from memtrain.compressors import Group, Key
from memtrain.kernels.floats import rounding
from memtrain.kernels.group import group
from memtrain.kernels.packing import pack
from memtrain.kernels.patch import patch
from memtrain.precision import FP8_FORWARD, FloatFormat

for module in pkgutil.walk_packages(memtrain.kernels.__path__, "memtrain.kernels."):
    if not module.name.endswith(("_triton", "libmemtrain")):
        importlib.import_module(module.name)

NAMES = sorted(
    name.split("::")[1]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("memtrain::")
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def views():
    """A tensor of each dtype, a transposed one, an empty one and one of no dimensions."""
    yield from (torch.randn(300).to(dtype) for dtype in DTYPES)
    yield torch.randn(20, 31).t()
    yield torch.randn(0, 3)
    yield torch.randn(())


def maps():
    for dtype in DTYPES:
        yield torch.randn(2, 5, 9, 3).to(dtype)
    yield torch.randn(2, 9, 5, 3).transpose(1, 2)
    yield torch.randn(0, 5, 9, 1)


def called(op, *arguments):
    return getattr(torch.ops.memtrain, op).default(*arguments)


TABLE = [-1.0, 0.0, 1.0]
LEVELS = [0.0, 0.25, 0.5, 1.0]


BOOKS = (("DE", 4, True), ("Linear", 3, False), ("DE", 8, True))


FORMATS = (FP8_FORWARD.layout, FloatFormat(6, 9, rounding="stochastic").layout)


def saved(x):
    """How graphs hold a tensor in groups of 4 bits."""
    flat, layout = flatten(x)
    group = Group(bits=4)
    return payload_ops.signature_of(group, layout, list(group.compress(flat, key=Key()).tensors))


def payloads():
    return [
        (called("compress_saved", x, form, (0, 1, 0, 0, 0)), form, x.shape, x.dtype)
        for x, form in ((x, saved(x)) for x in views())
    ]


CASES = {
    "compress_saved": lambda: [(x, saved(x), (0, 1, 0, 0, 0)) for x in views()],
    "decompress_saved": lambda: payloads(),
    "decompress_saved_on_host": lambda: payloads(),
    "pack_codes": lambda: [
        (x, bits)
        for bits in range(1, 9)
        for x in (
            torch.randint(2**bits, (300,), dtype=torch.uint8),
            torch.randint(2**bits, (20, 31), dtype=torch.uint8).t(),
        )
    ],
    "unpack_codes": lambda: [
        (pack.pack_codes(torch.ones(300, dtype=torch.uint8), bits), bits, 300)
        for bits in range(1, 9)
    ],
    "group_quantize": lambda: [
        (x, bits, 64, 7, stochastic)
        for x in views()
        for bits, stochastic in ((4, True), (3, False))
    ],
    "group_dequantize": lambda: [
        (*group.group_quantize(x, bits, 64), bits, 64, x.numel(), x.dtype)
        for x in views()
        for bits in (4, 3)
    ],
    "norm_quantize": lambda: [
        (x, 64, weight, None, 1e-5, centred, True, 4, 32, 7, True)
        for x in (torch.randn(3, 64), torch.randn(2, 2, 64).bfloat16(), torch.randn(0, 64))
        for weight, centred in ((torch.ones(64), True), (None, False))
    ],
    "patch_quantize": lambda: [(x, 7, stochastic) for x in maps() for stochastic in (False, True)],
    "patch_dequantize": lambda: [(patch.patch_quantize(x), *x.shape[1:3], x.dtype) for x in maps()],
    "codebook_quantize": lambda: [
        (x, *book, block_size, seed)
        for x in views()
        for book in BOOKS
        for block_size in (128, None)
        for seed in (None, 5)
    ],
    "codebook_dequantize": lambda: [
        (codes, own, *book, x.numel())
        for x in views()
        for book in BOOKS
        for codes, scale in [called("codebook_quantize", x, *book, 128, None)]
        for own in (scale, None)
    ],
    "floats_round": lambda: [
        (x, form, 7) for x in views() if x.dtype != torch.float64 for form in FORMATS
    ],
    "floats_round_inplace": lambda: [
        (x, form, 7) for x in views() if x.dtype != torch.float64 for form in FORMATS
    ],
    "floats_decode": lambda: [
        (rounding.encode(x, form), form, torch.bfloat16)
        for x in views()
        if x.dtype != torch.float64
        for form in FORMATS
    ],
    "derivative_encode": lambda: [
        (x.reshape(-1), *rest)
        for x in views()
        for rest in ((TABLE, "plain"), (TABLE, "even"), (TABLE[:2], "band"))
    ],
    "derivative_levels": lambda: [
        (called("derivative_encode", x.reshape(-1), TABLE, "plain"), LEVELS, grad, *of_x)
        for x in views()
        for of_x in [(x.numel(), x.dtype)]
        for grad in ((None, x) if x.is_contiguous() else (None,))
    ],
}


def test_every_registered_op_has_a_case():
    assert sorted(CASES) == NAMES


@pytest.mark.parametrize("op", sorted(CASES))
def test_op_passes_opcheck(op):
    # They have no derivative: what is trained through is a Function around them.
    checks = ("test_schema", "test_faketensor")
    whole = (*checks, "test_autograd_registration", "test_aot_dispatch_dynamic")
    for index, arguments in enumerate(CASES[op]()):
        overload = getattr(torch.ops.memtrain, op).default
        torch.library.opcheck(overload, arguments, test_utils=checks if index else whole)

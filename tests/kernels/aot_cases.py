"""Signatures and constants that each Triton kernel is compiled for ahead of time.

`CASES` has, for a module of `memtrain.kernels`, what `aot.py` compiles and
`benchmarks.machine_code` counts: a kernel, the types of its arguments, its constants and launch
options.
"""

from memtrain.kernels.codebook import quantize_triton as codebook
from memtrain.kernels.derivative import derivative_triton as derivative
from memtrain.kernels.floats import rounding_triton as rounding
from memtrain.kernels.group import group_triton as group
from memtrain.kernels.norm import norm_triton as norm
from memtrain.kernels.packing import pack_triton as packing
from memtrain.kernels.packing.bits import lanes
from memtrain.kernels.patch import patch_triton as patch
from memtrain.kernels.step import lloyd_max_triton, reduce_triton, step_triton
from memtrain.kernels.step.groups import blocks

EXACT = {"enable_fp_fusion": False}
WIDTHS = (2, 3, 4, 8)
"""Bits of 4, 8, 2 and 1 lanes: every form of the layout."""


def quantize(bits, dtype, size=256, *, stochastic=True, rows=False):
    signature = {"x_ptr": dtype, "codes_ptr": "*u8", "bounds_ptr": "*bf16"}
    sizes = dict.fromkeys(("n", "n_groups", "per_row", "stride"), "i32") | {"seed": "i64"}
    constants = {"BITS": bits, "WIDTH": size // 8, "STOCHASTIC": stochastic, "ROWS": rows}
    options = group._quantize_tile(size, rows)
    return group._quantize_kernel, signature | sizes, constants | EXACT | options


def dequantize(bits, dtype, size=256):
    signature = {"codes_ptr": "*u8", "bounds_ptr": "*bf16", "out_ptr": dtype}
    constants = {"BITS": bits, "WIDTH": size // 8} | EXACT | group.tile(size)
    return group._dequantize_kernel, signature | {"n": "i32", "n_groups": "i32"}, constants


def book(bits, size, dtype=None, **more):
    signature = dict.fromkeys(("values_ptr", "scale_ptr"), "*fp32") | {"codes_ptr": "*u8"}
    signature |= {"n": "i32", "n_blocks": "i32"}
    constants = {"BITS": bits, "WIDTH": size // 8} | EXACT | group.tile(size) | more
    if dtype is None:
        return codebook._dequantize_kernel, signature | {"out_ptr": "*fp32"}, constants
    signature |= {"x_ptr": dtype, "bounds_ptr": "*fp32", "seed": "i64"}
    constants |= {"SIGNED": not constants["SCALED"]}
    return codebook._quantize_kernel, signature, constants


def encode(dtype, bits, parity="plain"):
    pointers = {"x_ptr": dtype, "codes_ptr": "*u8", "table_ptr": "*fp32"}
    count = 0 if bits > 4 else 2 if parity == "band" else (1 << bits) - 1
    constants = {"BOUNDARIES": tuple(map(float, range(count))), "PARITY": parity}
    constants |= {"BITS": bits, "LANES": lanes(bits), "TILE": derivative._tile(bits)}
    return derivative._encode_kernel, pointers | {"n": "i64", "n_blocks": "i64"}, constants


def backward(dtype, bits, *, multiply=True):
    gather = bits > 4 or dtype == "*fp64"
    kind = "*fp64" if dtype == "*fp64" else "*fp32"
    pointers = {"grad_ptr": dtype, "codes_ptr": "*u8", "out_ptr": dtype, "table_ptr": kind}
    levels = () if gather else tuple(map(float, range(1 << bits)))
    constants = {"BITS": bits, "LANES": lanes(bits), "TILE": derivative._tile(bits)}
    constants |= {"LEVELS": levels, "GATHER": gather, "MULTIPLY": multiply}
    return derivative._backward_kernel, pointers | {"n": "i64", "n_blocks": "i64"}, constants


def norm_forward(dtype, size, bits, group_size=256, **constants):
    signature = {
        "x_ptr": dtype, "weight_ptr": "*fp32", "bias_ptr": "*fp32", "y_ptr": dtype,
        "rstd_ptr": "*fp32", "codes_ptr": "*u8", "bounds_ptr": "*bf16",
        "size": "i32", "eps": "fp32", "seed": "i64",
    }  # fmt: skip
    constants |= {"BITS": bits, "STOCHASTIC": True} | EXACT
    return norm._norm_kernel, signature, constants | norm._options(size, group_size)


def patches(dtype, kind, inner_one, whole, stochastic=None):
    back = stochastic is None
    pointers = {"words_ptr": "*i64"} | ({"out_ptr": dtype} if back else {"x_ptr": dtype})
    signature = pointers | dict.fromkeys(("n_patches", "rows", "columns", "inner"), "i32")
    constants = {"INNER_ONE": inner_one, "WHOLE": whole, "KIND": kind, "LANES": patch._LANES}
    if back:
        return patch._dequantize_kernel, signature, constants | EXACT
    constants |= {"STOCHASTIC": stochastic} | EXACT
    return patch._quantize_kernel, signature | {"seed": "i64"}, constants


def pack(kernel, bits, n="i32"):
    signature = {"x_ptr": "*u8", "packed_ptr": "*u8", "n": n}
    return kernel, signature, {"BITS": bits, "LANES": lanes(bits), "N_BLOCKS": packing.TILE}


ROUNDED = {"count_ptr": "*i64"} | dict.fromkeys(("n", "least", "limit", "over"), "i32")
FLOATS = ("*fp32", "*bf16", "*fp16")


def rounded(kernel, x, constants, **more):
    return kernel, {"x_ptr": x, "out_ptr": x} | ROUNDED | more, constants | {"MANTISSA": 2}


FORMS = ((True, True), (True, False), (False, False))
WEIGHTS = [("*fp32", "*fp32", 0), ("*bf16", "*bf16", 0), ("*fp16", "*fp16", 0)]
"""Types of a step's weights and gradients, and MASTER."""
WEIGHTS += [("*bf16", "*fp32", 0), *(("*bf16", "*bf16", master) for master in (1, 8, 16))]
WEIGHTS += [("*fp16", "*fp16", master) for master in (8, 16)]
LISTS = {"programs_ptr": "*i32", "table_ptr": "*i64"}
# RULE, STATES, BITS, SECOND, DRAWS.
KINDS = [(0, 2, bits, second, False) for bits, second in ((32, 0), (8, 0), (8, 2))]
KINDS += [(0, 2, 4, second, draws) for second in (0, 1, 2) for draws in (False, True)]
KINDS += [(rule, 1, bits, 0, (rule, bits) == (2, 4)) for rule in (1, 2) for bits in (4, 8, 32)]
KINDS += [(1, 0, 0, 0, False)]


def update(kind, whole, p, g, master):
    half = 128 if kind[2] == 8 else 64
    constants = dict(zip(("RULE", "STATES", "BITS", "SECOND", "DRAWS"), kind, strict=True))
    constants |= {"HALF": half, "COUNT": blocks(kind[2], whole) * 64 // half}
    constants |= step_triton.update_options(kind[2], kind[3], whole, p != "*fp32", kind[4])
    signature = {**LISTS, "p_like": p, "g_like": g}
    return step_triton._update_kernel, signature, constants | {"MASTER": master, "WHOLE": whole}


def update_two_bits(whole, p, g, master):
    constants = {"COUNT": blocks(2, whole), "HALF": 64, "MASTER": master, "WHOLE": whole}
    constants |= lloyd_max_triton.options(whole, master, p == "*fp16")
    return lloyd_max_triton._update_kernel, {**LISTS, "p_like": p, "g_like": g}, constants


def reduce(second, whole, p, g, master):
    signature = {**LISTS, "scalars_ptr": "*fp32", "p_like": p, "g_like": g}
    constants = {"SECOND": second, "MASTER": master, "WHOLE": whole}
    options = reduce_triton.reduce_options(second, whole)
    return reduce_triton._reduce_kernel, signature, constants | options


CASES = {
    "group.group_triton": [
        *(quantize(bits, "*fp32") for bits in WIDTHS),
        *(quantize(4, dtype) for dtype in ("*bf16", "*fp16")),
        quantize(4, "*bf16", stochastic=False),
        quantize(4, "*bf16", rows=True),
        quantize(3, "*fp32", 16384),
        *(dequantize(bits, "*fp32") for bits in WIDTHS),
        dequantize(4, "*bf16"),
        dequantize(4, "*fp16"),
        dequantize(3, "*fp32", 16384),
    ],
    "codebook.quantize_triton": [
        *(book(bits, 256, "*fp32", SCALED=False, STOCHASTIC=bits != 8) for bits in WIDTHS),
        *(book(bits, 128, "*fp32", SCALED=True, STOCHASTIC=bits == 4) for bits in (4, 8)),
        book(8, 2048, "*fp16", SCALED=False, STOCHASTIC=True),
        *(book(bits, 256, SCALED=False) for bits in WIDTHS),
        *(book(bits, 128, SCALED=True) for bits in (4, 8)),
    ],
    "derivative.derivative_triton": [
        *(
            encode(dtype, bits)
            for bits in range(1, 9)
            for dtype in (("*fp32", "*bf16", "*fp16", "*fp64") if bits in (3, 8) else ("*bf16",))
        ),
        *(encode("*bf16", 1, parity) for parity in ("even", "band")),
        *(
            backward(dtype, bits)
            for bits in range(1, 9)
            for dtype in ("*fp32", "*bf16", "*fp16", "*fp64")
        ),
        *(backward(dtype, 3, multiply=False) for dtype in ("*fp32", "*bf16", "*fp16", "*fp64")),
    ],
    "norm.norm_triton": [
        *(norm_forward("*fp32", 768, bits, CENTRED=True, NARROW=False) for bits in WIDTHS),
        norm_forward("*bf16", 4096, 4, CENTRED=False, NARROW=True),
        norm_forward("*bf16", 8192, 4, CENTRED=True, NARROW=False),
        norm_forward("*fp16", 4096, 4, CENTRED=False, NARROW=True),
        norm_forward("*bf16", 16384, 3, 16384, CENTRED=True, NARROW=False),
    ],
    "packing.pack_triton": [
        *(
            pack(kernel, bits, n)
            for kernel in (packing._pack_kernel, packing._unpack_kernel)
            for bits, n in ((1, "i32"), (2, "i32"), (3, "i32"), (4, "i64"), (5, "i32"), (7, "i64"))
        ),
        pack(packing._pack_kernel, 8),
    ],
    "patch.patch_triton": [
        patches(dtype, kind, *form, stochastic)
        for kind, dtype in enumerate(FLOATS)
        for form in FORMS
        for stochastic in (kind == 0, None)
    ],
    "floats.rounding_triton": [
        *(
            rounded(rounding._nearest_kernel, x, {"ROUNDING": how})
            for x in FLOATS
            for how in (0, 1)
        ),
        *(rounded(rounding._stochastic_kernel, x, rounding._OPTIONS, seed="i64") for x in FLOATS),
    ],
    "step.step_triton": [
        update(kind, whole, *weights)
        for whole in (True, False)
        for weights in WEIGHTS
        for kind in KINDS
    ],
    "step.lloyd_max_triton": [
        update_two_bits(whole, *weights) for whole in (True, False) for weights in WEIGHTS
    ],
    "step.reduce_triton": [
        *(
            reduce(second, whole, *weights)
            for whole in (True, False)
            for weights in WEIGHTS
            for second in (1, 2)
        ),
        (reduce_triton._mean_kernel, LISTS, EXACT),
        (reduce_triton._ratio_kernel, LISTS, EXACT),
    ],
}

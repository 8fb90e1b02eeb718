"""Triton's ops hold while they run what they declare: what their wrappers allocate, op by op."""

import importlib
import pkgutil
from itertools import accumulate

import pytest
import torch
from torch import nn

import memtrain.kernels
from memtrain.audit.peak.op_workspace import cuda_workspace_of
from memtrain.audit.peak.recorder import StorageRecorder
from memtrain.kernels.codebook import quantize
from memtrain.kernels.derivative import derivative
from memtrain.kernels.dispatch import INSIDE_CUDA, backend
from memtrain.kernels.floats import rounding
from memtrain.kernels.group import group
from memtrain.kernels.norm import norm
from memtrain.kernels.packing import pack
from memtrain.kernels.patch import patch
from memtrain.precision import FP8_FORWARD

N = 2**14
BOOK, PLAIN, CODES = ("DE", 4, True), ([-1.0, 0.0, 1.0], "plain"), (4, 256, 0, True)
FORM, LEVELS = FP8_FORWARD.layout, [0.0, 0.25, 0.5, 1.0]
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES, torch.float64)
LAYOUTS = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.t(),
    "gaps": lambda x: x.new_zeros(len(x), 2 * x.shape[1])[:, : x.shape[1]],
}
CASES = {}
"""Op and case -> its Triton implementation's module and name, the op, and arguments."""


def own(case, op, module, implementation, *args):
    CASES[f"{op}: {case}"] = module, implementation, op, args


def zeros(dtype=torch.float32, shape=(128, 128)):
    return torch.zeros(shape, dtype=dtype)


for name, lay in LAYOUTS.items():
    own(name, "pack_codes", pack, "_pack", lay(zeros(torch.uint8)), 4)
    own(name, "floats_decode", rounding, "_decode", lay(zeros(torch.uint8)), FORM, HALVES[0])
    for dtype in DTYPES:
        x, case = lay(zeros(dtype)), f"{name}, {dtype}"
        own(case, "group_quantize", group, "_quantize", x, *CODES)
        rows = 4, 128, 0, True
        own(f"{case}, by rows", "group_quantize", group, "_quantize", x, *rows)
        for size in (128, None):
            at = f"{case}, blocks of {size}"
            own(at, "codebook_quantize", quantize, "_quantize", x, *BOOK, size, None)
        maps = x.unflatten(0, (2, 64)).unflatten(2, (64, 2))
        own(case, "patch_quantize", patch, "_quantize", maps, 0, True)
        if name != "gaps":
            own(case, "derivative_encode", derivative, "_encode", x, *PLAIN)
        if dtype != torch.float64:
            for op in ("round", "round_inplace"):
                own(case, f"floats_{op}", rounding, f"_{op}", x, FORM, 0)
for dtype in DTYPES:
    payload, words = (
        group.group_quantize(zeros(), 4, 256),
        patch.patch_quantize(zeros(shape=(1, 128, 128, 1))),
    )
    own(dtype, "group_dequantize", group, "_dequantize", *payload, 4, 256, N, dtype)
    own(dtype, "patch_dequantize", patch, "_dequantize", words, 128, 128, dtype)
    codes = derivative._encode(zeros(dtype), *PLAIN)
    for grad in (None, zeros(dtype)):
        case = f"{dtype}, {'a' if grad is not None else 'no'} gradient"
        own(case, "derivative_levels", derivative, "_levels", codes, LEVELS, grad, N, dtype)
for dtype in (torch.float32, *HALVES):
    for weight in (None, zeros(shape=512), zeros(dtype, 512)):
        case = f"{dtype}, {'no' if weight is None else weight.dtype} weight"
        given = zeros(dtype), 512, weight, None, 1e-5, True, False, *CODES
        own(case, "norm_quantize", norm, "_norm", *given)
own("codes", "unpack_codes", pack, "_unpack", torch.zeros(N // 2, dtype=torch.uint8), 4, N)
codes, scale = quantize._quantize(zeros(), *BOOK, 128, None)
for case, own_scale in (("blocks", scale), ("scaled", None)):
    given = codes, own_scale, *BOOK, N
    own(case, "codebook_dequantize", quantize, "_dequantize", *given)


@pytest.fixture
def unlaunched(monkeypatch):
    """No kernel is run: what their wrappers allocate does not depend on it."""
    pytest.importorskip("triton")
    for _, name, _ in pkgutil.walk_packages(memtrain.kernels.__path__, "memtrain.kernels."):
        if name.endswith("_triton"):
            module = importlib.import_module(name)
            if hasattr(module, "launch"):
                monkeypatch.setattr(module, "launch", lambda *given, **options: None)


@pytest.mark.usefixtures("unlaunched")
def test_what_tritons_ops_hold_is_what_they_declare():
    assert {f"memtrain::{op}" for _, _, op, _ in CASES.values()} >= set(INSIDE_CUDA)
    wrong = {}
    for case, (module, implementation, op, args) in CASES.items():
        run, recorder = getattr(module, implementation), StorageRecorder(nn.Identity())
        with backend("triton"):
            run(*args)  # tables are made at the first call
            with recorder:
                result = run(*args)
        alive = [*accumulate(delta for _, delta, _, _ in recorder.events)] or [0]
        declared = cuda_workspace_of(getattr(torch.ops.memtrain, op).default, args, {}, result)
        if declared != max(alive) - alive[-1]:
            wrong[case] = declared, max(alive) - alive[-1]
    assert not wrong

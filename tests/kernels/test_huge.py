"""More than 2**31 elements: shapes and bytes without memory, and the width of every offset."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain import kernels
from memtrain.compressors import COMPRESSORS, Group, Key
from memtrain.kernels.derivative import derivative
from memtrain.kernels.packing.pack import pack_codes, unpack_codes
from memtrain.kernels.step import launch, table_triton
from memtrain.kernels.step.groups import elements, inputs_of
from memtrain.kernels.step.step import Entry
from memtrain.kernels.step.update_rules import sgd
from tests.kernels import test_lloyd_max

N = 2**31 + 300
KERNELS = Path(kernels.__file__).parent
SHAPE = (2**16, 2**15 + 1)  # the same in two dimensions, a row more
SIZE = 2**16 * (2**15 + 1)


def ceil(n, by):
    return -(-n // by)


# Bytes of N elements in one dimension, or of SHAPE.
BYTES = {
    "identity": (torch.bfloat16, 2 * N),
    "derivative": (torch.bfloat16, ceil(N, 256) * 96),
    "group": (torch.bfloat16, ceil(N, 256) * 132),
    "samples": (torch.bfloat16, SHAPE[0] * ceil(SHAPE[1], 256) * (64 + 4)),
    "host": (torch.bfloat16, ceil(N, 256) * 132),
    "integers": (torch.int64, 8 * N),
    "block": (torch.bfloat16, ceil(N, 128) * 68),
    "patch": (torch.bfloat16, ceil(N, 4) * 8),
    "rank1": (torch.bfloat16, ceil(SIZE, 128) * 64 + 4 * sum(SHAPE)),
    "lloyd_max": (torch.bfloat16, ceil(SIZE, 128) * 34 + 4 * sum(SHAPE)),
    "factored": (torch.bfloat16, 4 * sum(SHAPE)),
    "float": (torch.float32, N),
}
FIELDS = {"host": {"inner": Group()}, "integers": {"limit": 2**40}}
TWO = ("samples", "rank1", "lloyd_max", "factored")


def test_every_compressor_is_here():
    assert COMPRESSORS.keys() == BYTES.keys()


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_more_than_two_to_the_31_elements(name, where):
    compressor = COMPRESSORS[name](**FIELDS.get(name, {}))
    dtype, nbytes = BYTES[name]
    shape = SHAPE if name in TWO else (N,)

    def roundtrip(x):
        packed = compressor.compress(x, key=Key())
        return packed.nbytes, compressor.decompress(packed)

    if where == "fake":
        with FakeTensorMode():
            found, y = roundtrip(torch.empty(shape, dtype=dtype))
    else:
        found, y = roundtrip(torch.empty(shape, dtype=dtype, device="meta"))
    assert (y.shape, y.dtype) == (shape, dtype)
    assert found == nbytes


def test_fused_ops_take_more_than_two_to_the_31_elements():
    with FakeTensorMode():
        x = torch.empty(N, dtype=torch.bfloat16)
        codes = derivative.encode(x, [-1.0, 0.0, 1.0])
        dx = derivative.backward(x, codes, [0.0, 0.25, 0.5, 1.0])
        values = unpack_codes(pack_codes(torch.empty(N, dtype=torch.uint8), 3), 3, N)
    assert (dx.shape, values.shape) == ((N,), (N,))
    assert codes.shape == (ceil(N, 256), 64)


# -- the kernels' own arithmetic --------------------------------------------------------------

PROGRAM = "tl.program_id"
TRITON = [path for path in sorted(KERNELS.rglob("*_triton.py")) if PROGRAM in path.read_text()]


@pytest.mark.parametrize("path", TRITON, ids=lambda path: path.stem)
def test_programs_are_numbered_in_64_bits_before_any_product(path):
    """A program's number times its elements is an offset; patches are the one, stated exception."""
    source = path.read_text()
    programs = re.findall(r"tl\.program_id\(\d\)[^\n]*", source)
    assert programs
    for use in programs:
        widened = re.match(r"tl\.program_id\(\d\)\.to\(tl\.int64\)", use)
        # Two numbers for each program: up to 2**30 programs.
        table = re.match(r"tl\.program_id\(0\)( \+ 1)?\)\.to\(tl\.int64\)", use)
        # Patches are numbered in 32 bits, which `patch_quantize` checks; their elements in 64.
        patches = path.stem == "patch_triton" and use.startswith("tl.program_id(0) * LANES")
        # A chunk's number takes 32 bits; its elements 64.
        chunk = use == "tl.program_id(0) + 1)" and "chunk.to(tl.int64) * " in source
        # Divided in 32 bits, since 64 take a call: the row has 64.
        row = re.match(r"tl\.program_id\(0\)($|  #)", use) and re.search(
            r"= \(program // \w+\)\.to\(tl\.int64\)", source
        )
        assert widened or table or patches or chunk or row, use


def test_patches_of_more_than_two_to_the_31_are_refused():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"patches; allowed: up to 2\*\*31"):
        COMPRESSORS["patch"]().compress(torch.empty(2**16, 2**17, 1, 1), key=Key())


def signatures(source):
    source = re.sub(r"//[^\n]*", "", source)
    return re.findall(r"MT_EXPORT\s+[\w* ]+\s(mt_\w+)\(([^)]*)\)\s*\{", source)


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cpp")), ids=lambda path: path.stem)
def test_every_integer_that_a_c_kernel_takes_has_64_bits(path):
    source = path.read_text()
    found = signatures(source)
    assert len(found) == len(re.findall(r"MT_EXPORT[^;{]*\{", source))
    for name, arguments in found:
        for argument in filter(None, (part.strip() for part in arguments.split(","))):
            pointer, integer = "*" in argument, re.match(r"u?int64_t\b", argument)
            assert pointer or integer or re.match(r"(float|double)\b", argument), (name, argument)


@pytest.mark.nightly
def test_a_mask_of_more_than_two_to_the_31_elements():
    """Really: 4.5 GiB at its peak."""
    mask = torch.zeros(N, dtype=torch.bool)
    ends = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, N - 1]
    mask[ends] = True
    back = unpack_codes(pack_codes(mask.view(torch.uint8), 1), 1, N)
    assert back[ends].all()
    assert int(back.sum()) == len(ends)


@pytest.mark.parametrize("kind", ["exact", "2 bits"])
@pytest.mark.parametrize("where", [0, 2**31 - 2048, 2**31 + 2048, 3 * 2**30, 2**32])
def test_a_step_that_is_refused_changes_nothing_wherever_a_program_begins(where, kind):
    if kind == "exact":
        entry = Entry(torch.ones(2048), torch.ones(2048), (), (), "sgd", sgd(lr=1.0, momentum=0.0))
    else:
        entry = test_lloyd_max.entry((16, 128), test_lloyd_max.hyper())
    before = copy.deepcopy(entry)
    entry = entry._replace(guard=torch.tensor(torch.inf))
    one = launch.TritonEntryGroup([entry])
    one.begin(inputs_of([entry]))
    table, each = one._table, elements(entry)
    table[0, table_triton.NUMEL.value] = where + 2048
    for name in (table_triton.P, table_triton.G):  # element `where` is the first one here
        table[0, name.value] -= 4 * where
    one._programs["update"] = torch.tensor([[0, where // each]], dtype=torch.int32)
    one.update()
    assert torch.equal(entry.param, before.param)
    for state, was in zip(entry.states, before.states, strict=True):
        assert all(torch.equal(state[name], was[name]) for name in was)

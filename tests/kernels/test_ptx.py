"""PTX on a CPU: instructions by hand, and that faults of a launch are reported.

The kernels' own tests run on it in a process where kernels compile: `MEMTRAIN_PTX=1`.
"""

import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.kernel import Kernel
from tests.kernels.ptx.memory import Fault, Memory
from tests.kernels.ptx.program import parse
from tests.kernels.test_aot import compiling

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry tested(
    .param .u64 .ptr .global .align 1 tested_param_0,
    .param .u64 .ptr .global .align 1 tested_param_1
)
.reqntid 32
{
    .reg .pred %p<9>; .reg .b16 %rs<20>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    ld.param.b64 %rd1, [tested_param_0];
    ld.param.b64 %rd2, [tested_param_1];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd3, %r1, 4, %rd1;
    mad.wide.u32 %rd4, %r1, 4, %rd2;
    ld.global.b32 %r2, [ %rd3 + 0 ];
"""


def run(body, x=None, *, programs=1, fuse=False, shared=0, out=32, seed=None):
    """What 32 threads write, as int32, whose number is %r1 and input %r2; %rd4 is their place."""
    x = torch.arange(32) if x is None else torch.as_tensor(x)
    x = x if x.is_floating_point() else x.int()
    result = torch.zeros(out, dtype=torch.int32)
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (x, result)]
    program = parse(HEAD + body + "\n    ret;\n}", fuse=fuse)
    given = [x.data_ptr(), result.data_ptr()]
    Kernel(program, shared, seed).launch((programs, 1, 1), given, Memory(ranges, list))
    return result


def written(text, x=None, **options):
    return run(f"{text}; st.global.b32 [ %rd4 + 0 ], %r3;", x, **options)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("add.s32 %r3, %r2, -40", lambda x: x - 40),
        ("mul.lo.s32 %r3, %r2, -3", lambda x: -3 * x),
        ("mul.hi.u32 %r3, %r2, -1", lambda x: max(x - 1, 0)),
        ("mul.wide.u32 %rd9, %r2, 65537; mul.hi.u64 %rd9, %rd9, -1; cvt.u32.u64 %r3, %rd9",
         lambda x: max(65537 * x - 1, 0)),
        ("sub.s32 %r4, %r2, 9; div.s32 %r3, %r4, 4", lambda x: int((x - 9) / 4)),
        ("sub.s32 %r4, %r2, 9; shr.s32 %r3, %r4, 40", lambda x: -1 if x < 9 else 0),
        ("shl.b32 %r3, %r2, 32", lambda x: 0),
        ("bfe.u32 %r3, %r2, 1, 3", lambda x: x >> 1 & 7),
        ("bfe.s32 %r3, %r2, 1, 3", lambda x: (x >> 1 & 7) - 8 * (x >> 3 & 1)),
        ("bfi.b32 %r3, %r2, -1, 4, 8", lambda x: x << 4 | -1 & ~0xFF0),
        ("prmt.b32 %r3, %r2, 0x8040, 0x7054", lambda x: x << 16 | 0x8040),
        ("prmt.b32 %r3, %r2, 0x8040, 0xD", lambda x: 0xFF | x * 0x01010100),
        ("popc.b32 %r3, %r2", lambda x: x.bit_count()),
        ("shf.l.wrap.b32 %r3, %r2, 7, 30", lambda x: x >> 2 | 3 << 30),
        ("cvt.u16.u32 %rs1, %r2; neg.s16 %rs1, %rs1; cvt.s32.s16 %r3, %rs1", lambda x: -x),
        ("setp.lt.u32 %p1, %r2, 7; selp.b32 %r3, 5, %r2, %p1", lambda x: 5 if x < 7 else x),
        ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1}", lambda x: x << 16),
        ("{ .reg .b32 at; add.u32 at, %r2, 1; mov.b32 %r3, at; }", lambda x: x + 1),
        ("shfl.sync.bfly.b32 %r3, %r2, 3, 31, -1", lambda x: x ^ 3),
        ("shfl.sync.idx.b32 %r3, %r2, 37, 31, -1", lambda x: 5),
        ("sub.s32 %r4, %r2, 9; mad.wide.s32 %rd9, %r4, -7, 5; shr.s64 %rd9, %rd9, 1;"
         "cvt.u32.u64 %r3, %rd9", lambda x: (-7 * (x - 9) + 5) >> 1),
        ("sub.s32 %r4, %r2, 9; max.s32 %r3, %r4, -2", lambda x: max(x - 9, -2)),
        ("sub.s32 %r4, %r2, 9; min.u32 %r3, %r4, 4", lambda x: min((x - 9) % 2**32, 4)),
        ("setp.lt.u32 %p1|%p2, %r2, 7; selp.b32 %r3, 5, 6, %p2", lambda x: 6 if x < 7 else 5),
        ("cvt.s64.s32 %rd9, -1; bfe.s64 %rd9, %rd9, 60, 8; cvt.u32.u64 %r3, %rd9", lambda x: -1),
        ("redux.sync.add.s32 %r3, %r2, -1", lambda x: 496),
        ("redux.sync.max.s32 %r3, %r2, -1", lambda x: 31),
    ],
)  # fmt: skip
def test_integers(text, value):
    # as 32 bits, whose sign is the last one
    expected = [(value(x) + 2**31) % 2**32 - 2**31 for x in range(32)]
    assert written(text).tolist() == expected


_NAN, _INF, _LEAST = math.nan, math.inf, 2.0**-149
FLOATS = (0.0, -0.0, 1.5, -1.5, 2.5, _LEAST, -_LEAST, 2.0**31, -(2.0**40), _INF, -_INF, _NAN)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("min.f32 %r3, %r2, 0f80000000", lambda x: -0.0 if math.isnan(x) or x >= 0 else x),
        ("max.f32 %r3, %r2, 0f00000000", lambda x: x if x > 0 else 0.0),
        ("max.NaN.f32 %r3, %r2, 0f00000000", lambda x: x if x > 0 or math.isnan(x) else 0.0),
        ("add.ftz.f32 %r3, %r2, 0f80000000", lambda x: 0.0 * x if abs(x) == _LEAST else x),
        ("abs.f32 %r3, %r2", abs),
        ("cvt.rzi.s32.f32 %r4, %r2; cvt.rn.f32.s32 %r3, %r4",
         lambda x: 0.0 if math.isnan(x) else float(math.trunc(min(max(x, -(2**31)), 2**31 - 1)))),
        ("cvt.rni.s32.f32 %r4, %r2; cvt.rn.f32.s32 %r3, %r4",
         lambda x: 0.0 if math.isnan(x) else float(round(min(max(x, -(2**31)), 2**31 - 1)))),
        ("cvt.rn.bf16.f32 %rs1, %r2; cvt.f32.bf16 %r3, %rs1",
         lambda x: torch.tensor(x).bfloat16().item()),
        *((f"setp.{name}.f32 %p1, %r2, 0f3FC00000; selp.f32 %r3, 0f3F800000, 0, %p1", holds)
          for name, holds in {
              "eq": lambda x: float(x == 1.5), "ne": lambda x: float(x < 1.5 or x > 1.5),
              "neu": lambda x: float(x != 1.5), "gt": lambda x: float(x > 1.5),
              "gtu": lambda x: float(not x <= 1.5), "le": lambda x: float(x <= 1.5),
              "num": lambda x: float(x == x), "nan": lambda x: float(x != x),
          }.items()),
    ],
)  # fmt: skip
def test_floats(text, function):
    x = torch.tensor([FLOATS[k % len(FLOATS)] for k in range(32)])
    want = torch.tensor([function(value) for value in x.tolist()])
    got = written(text, x).view(torch.float32)
    same = (got == want) & (got.signbit() == want.signbit())
    assert (same | (got.isnan() & want.isnan())).all(), (got, want)


def test_a_factor_that_is_written_meanwhile_is_not_fused():
    text = "mov.b32 %r6, %r2; mul.f32 %r4, %r6, %r6; add.f32 %r6, %r6, 0f3F800000;"
    x = torch.rand(32)
    got = written(f"{text} add.f32 %r3, %r4, 0fBF800000", x, fuse=True)
    assert torch.equal(got.view(torch.float32), x * x - 1)


def test_a_loop_runs_as_often_as_each_thread_asks():
    body = """
    mov.b32 %r3, 0; mov.b32 %r4, 0;
$again:
    setp.ge.u32 %p1, %r4, %r2;
    @%p1 bra $out;
    add.u32 %r4, %r4, 1;
    and.b32 %r5, %r4, 1; setp.eq.b32 %p2, %r5, 0;
    @!%p2 bra $again;
    add.u32 %r3, %r3, %r4;
    bra.uni $again;
$out:
    st.global.b32 [ %rd4 + 0 ], %r3;
    """
    assert run(body).tolist() == [sum(range(0, x + 1, 2)) for x in range(32)]


def test_threads_that_have_returned_write_no_more():
    body = "setp.gt.u32 %p1, %r1, 9; @%p1 ret; st.global.b32 [ %rd4 + 0 ], 7;"
    assert run(body).tolist() == [7] * 10 + [0] * 22


def test_a_product_and_a_sum_are_rounded_once():
    torch.manual_seed(1)
    a, b, c = (torch.randn(1000) * 2.0 ** torch.randint(-30, 30, (1000,)) for _ in range(3))
    c[:500] = -(a * b)[:500]  # nearly all cancels
    got = arithmetic.fma(a.numpy(), b.numpy(), c.numpy())
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(*map(torch.Tensor.tolist, (a, b, c)), strict=True)
    ]
    below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
    for own, low, high, true in zip(got, below, above, exact, strict=True):
        error = abs(Fraction(float(own)) - true)
        assert all(error <= abs(Fraction(float(other)) - true) for other in (low, high))


def test_a_free_product_goes_into_its_sum_where_ptxas_may_do_that():
    x = torch.rand(32) + 1
    text = "mul{0}.f32 %r4, %r2, %r2; add{0}.f32 %r3, %r4, 0fBF800000"
    once = (x.double() ** 2 - 1).float().view(torch.int32)
    twice = (x * x - 1).view(torch.int32)
    assert torch.equal(written(text.format(""), x, fuse=True), once)
    assert torch.equal(written(text.format(".rn"), x, fuse=True), twice)
    assert torch.equal(written(text.format(""), x), twice)
    assert not torch.equal(once, twice)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("rcp.approx.ftz.f32 %r3, %r2", torch.reciprocal),
        ("sqrt.approx.ftz.f32 %r3, %r2", torch.sqrt),
        ("div.full.f32 %r3, 0f40400000, %r2", lambda x: 3 / x),
    ],
)
def test_approximate_functions_are_off_by_no_more_than_they_may_be(text, function):
    x = torch.rand(32) + 0.5
    bits = function(x.double()).float().view(torch.int32)
    assert torch.equal(written(text, x), bits)
    off = written(text, x, seed=3) - bits
    assert 0 < off.abs().max() <= 2
    assert torch.equal(written(text, x, seed=3) - bits, off)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "trans"])
def test_matrices_go_through_shared_memory(transposed):
    # Thread t holds elements 2 t and 2 t + 1 of 64, in rows of 8.
    trans = ".trans" if transposed else ""
    body = f"""
    shl.b32 %r4, %r1, 1; add.u32 %r5, %r4, 1; shl.b32 %r5, %r5, 16; or.b32 %r4, %r4, %r5;
    and.b32 %r6, %r1, 7; shl.b32 %r6, %r6, 4;
    stmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 [%r6], {{%r4}};
    bar.sync 0;
    shl.b32 %r7, %r1, 2;
    ld.shared.b32 %r3, [ %r7 + 0 ];
    st.global.b32 [ %rd4 + 0 ], %r3;
    """
    matrix = torch.arange(64, dtype=torch.int16).view(8, 8)
    matrix = matrix.t().contiguous() if transposed else matrix
    assert torch.equal(run(body, shared=128).view(torch.int16).view(8, 8), matrix)
    back = body.replace(
        "ld.shared.b32 %r3, [ %r7 + 0 ]",
        f"ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r3}}, [%r6]",
    )
    assert run(back, shared=128).view(torch.int16).tolist() == list(range(64))


def test_an_atomic_sum_takes_each_thread_in_turn():
    body = "atom.global.gpu.relaxed.add.u32 %r3, [ %rd2 + 4 ], %r2;"
    assert run(body, programs=3)[1] == 3 * 496


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.global.b32 [ %rd4 + 2 ], 1;", "misaligned address: st.global.b32"),
        ("st.global.b32 [ %rd4 + 4 ], 1;", "is outside of every tensor: st.global.b32"),
        ("ld.global.v2.b32 {%r3, %r4}, [ %rd3 + 0 ];", "misaligned address: ld.global.v2.b32"),
        ("setp.gt.u32 %p1, %r1, 9; @%p1 bar.sync 0;", "not all threads of a program"),
        ("ld.shared.b32 %r3, [ %r1 + 64 ];", "misaligned address: ld.shared.b32"),
        ("ld.shared.b32 %r3, [ 64 ];", "outside of 64 bytes of shared memory"),
        ("setp.gt.u32 %p1, %r1, 9; @%p1 shfl.sync.idx.b32 %r3, %r2, 5, 31, -1;", "threads of a"),
        ("setp.gt.u32 %p1, %r1, 9; @%p1 redux.sync.add.s32 %r3, %r2, -1;", "threads of a warp"),
    ],
)  # fmt: skip
def test_what_a_device_would_refuse_is_a_fault(body, said):
    with pytest.raises(Fault, match=said):
        run(body, shared=64)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.global.b32 [ %rd4 + 0 ], 1;", "two programs write the byte"),
        ("setp.eq.b32 %p1, %r6, 0; @%p1 st.global.b32 [ %rd4 + 0 ], 1;"
         "ld.global.b32 %r3, [ %rd4 + 0 ];",
         "a program reads the byte that another writes"),
    ],
)  # fmt: skip
def test_programs_that_meet_are_a_fault(body, said):
    body = f"mov.u32 %r6, %ctaid.x; {body}"
    run(body)
    with pytest.raises(Fault, match=said):
        run(body, programs=2)


def test_an_unknown_instruction_is_reported():
    with pytest.raises(NotImplementedError, match=r"mma\.sync"):
        run("mma.sync.aligned.m16n8k16 %r3, %r3, %r3;")


def executed(*tests, seed="1"):
    """How many of the kernels' tests pass on the PTX that is compiled for them."""
    environment = {k: v for k, v in compiling().items() if not k.startswith("PYTEST_")}
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(folder / name for name in tests)],
        env=environment | {"MEMTRAIN_PTX": seed},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


SOME = (
    "test_philox.py::test_philox_is_the_stream_of_triton[0-True-triton]",
    "test_launches.py::test_triton_launches_again_what_was_compiled_for_such_arguments",
    "test_group.py::test_twin_equals_reference_on_hard_numbers[triton]",
    "test_codebook_kernels.py::test_what_is_beyond_all_values_is_the_last_one"
    "[Codebook(name='DE', bits=4, signed=True)-triton]",
    "test_floats.py::test_in_place_is_the_same[form2-torch.bfloat16-triton]",
    "test_norm.py::test_a_constant_row_is_zero",
    "test_blockstep.py::test_triton_equals_the_reference[adamw-8]",
    "test_blockstep.py::test_triton_equals_the_reference[lion-4]",
    "test_lloyd_max.py::test_dead_rows_and_columns_do_not_move",
)
"""What CI runs as compiled, a kernel of each kind."""


def test_kernels_equal_their_references_as_compiled():
    assert executed(*SOME) >= len(SOME)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", ["1", "7"], ids=["exact", "approximate"])
def test_all_kernels_equal_their_references_as_compiled(seed):
    """With what a device gives for approximate instructions, and with what it may give.

    What launches ask for is compiled without a stack and without spills.
    """
    assert executed(".", seed=seed) > 850

import pytest
import torch

from memtrain.compressors.fewbit.solver import table
from memtrain.kernels.cpu import library
from memtrain.kernels.derivative import derivative
from memtrain.kernels.dispatch import backend, has_triton
from tests.kernels.steps import instructions

BACKENDS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(library() is None, reason="no C++ library")),
    pytest.param("triton", marks=pytest.mark.skipif(not has_triton(), reason="no triton")),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAN, INF = float("nan"), float("inf")


def device(name: str) -> str:
    return "cpu" if name == "cpu" else DEVICE


@pytest.mark.parametrize("name", BACKENDS)
def test_encode_packs_the_worked_example(name):
    # Position 0 of the eight lanes of 32: elements 0, 32, 64, ..., 224.
    x = torch.zeros(256, device=device(name))
    x[::32] = torch.tensor([-5.0, -2.0, -2.5, 0.0, 0.5, 1.0, 9.0, 3.0])
    with backend(name):
        one = derivative.encode(x, [-2.0]).cpu()
        three = derivative.encode(x, [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0]).cpu()
    # 1 bit: x > -2: lanes 0, 1, 2 are not; every other position is 0 > -2 in all lanes
    assert one[0].tolist() == [0b11111000] + [255] * 31
    # 3 bits: codes 0 2 2 4 5 5 7 7, lane 0 lowest, 24 bits in three bytes at distances of 32
    word = sum(code << (3 * lane) for lane, code in enumerate([0, 2, 2, 4, 5, 5, 7, 7]))
    assert three[0, ::32].tolist() == [word & 255, word >> 8 & 255, word >> 16]


@pytest.mark.parametrize("name", BACKENDS)
def test_backward_multiplies_by_the_level_of_each_element(name):
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.1, 1.0, 1.5], device=device(name))
    grad = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, -1.0, 3.0], device=device(name))
    levels = [0.25, -0.5, 2.0, 1.5]
    with backend(name):
        codes = derivative.encode(x, [-1.0, 0.0, 1.0])
        level = derivative.decode(codes, levels, 7)
        dx = derivative.backward(grad, codes, levels)
        even = derivative.decode(derivative.encode(x, [0.5, 1.0, 2.0], parity="even"), levels, 7)
    assert level.tolist() == [0.25, 0.25, -0.5, -0.5, 2.0, 2.0, 1.5]
    assert dx.tolist() == [0.25, 0.5, -2.0, -4.0, 32.0, -2.0, 4.5]
    assert even.tolist() == [1.5, -0.5, 0.25, 0.25, 0.25, -0.5, 2.0]


def samples(n: int, dtype: torch.dtype, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, grad = torch.randn(n, device=where) * 2, torch.randn(n, device=where)
    return x.to(dtype), grad.to(dtype)


def beside_the_reference(name, x, grad, boundaries, levels, **options):
    """Codes, products and levels of the reference, each with those of a backend."""
    results = []
    for choice in ("reference", name):
        with backend(choice):
            codes = derivative.encode(x, boundaries, **options)
            dx = derivative.backward(grad, codes, levels)
            results.append((codes, dx, derivative.decode(codes, levels, x.numel(), x.dtype)))
    return zip(*results, strict=True)


@pytest.mark.parametrize("name", BACKENDS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_kernels_equal_the_reference(name, dtype, bits):
    x, grad = samples(5000 if name == "cpu" else 1300, dtype, device(name))
    for function in ("gelu", "tanh"):  # plain and even
        step = table(function, bits)
        given = x, grad, list(step.boundaries), list(step.levels)
        for reference, kernel in beside_the_reference(name, *given, parity=step.parity):
            assert torch.equal(reference, kernel)


@pytest.mark.skipif(library() is None, reason="no C++ library")
@pytest.mark.parametrize("level", [0, 2], ids=["portable", "avx512"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_instruction_set_equals_the_reference(level, dtype, bits):
    n = 263001 if bits == 1 else 5000  # gradients of many bfloat16s have another way
    x, grad = samples(n, dtype, "cpu")
    boundaries = torch.linspace(-2, 2, 2**bits - 1).tolist() if bits > 1 else [0.5]
    x[: len(boundaries)] = torch.tensor(boundaries).to(x)  # ties
    x[300], x[301], x[302], grad[400], grad[401] = NAN, INF, -INF, NAN, INF
    levels = torch.linspace(0, 3, 2**bits).tolist()
    with instructions(level):
        pairs = beside_the_reference("cpu", x, grad, boundaries, levels)
    for reference, kernel in pairs:
        torch.testing.assert_close(kernel, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 7, 255, 256, 257, 4095, 4097])
@pytest.mark.parametrize("name", BACKENDS)
def test_any_size_goes_through(name, n):
    x, grad = samples(n, torch.float32, device(name))
    step = table("silu", 3)
    with backend(name):
        codes = derivative.encode(x, list(step.boundaries))
        dx = derivative.backward(grad, codes, list(step.levels))
    assert codes.shape == ((n + 255) // 256, 96)
    inner = torch.tensor(step.boundaries, device=x.device)
    levels = torch.tensor(step.levels, device=x.device)
    assert torch.equal(dx, grad * levels[(x[:, None] > inner).sum(1)])


@pytest.mark.parametrize("name", BACKENDS[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 5, 6, 7, 8])
def test_other_widths_and_sides_equal_the_reference(name, dtype, bits):
    x, grad = samples(5000 if name == "cpu" else 600, dtype, device(name))
    boundaries = torch.linspace(-2, 2, 2**bits - 1).tolist() if bits > 1 else [-0.5, 1.0]
    x[: len(boundaries)] = torch.tensor(boundaries).to(x)  # ties
    x[300], x[301], x[302] = NAN, INF, -INF
    levels = torch.linspace(-1, 3, 2**bits).tolist()
    for parity in ("band",) if bits == 1 else ("plain", "even"):
        pairs = beside_the_reference(name, x, grad, boundaries, levels, parity=parity)
        assert all(torch.equal(reference, kernel) for reference, kernel in pairs)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_band_is_open_below_and_closed_above(name):
    x = torch.tensor([-1.0, -0.5, 0.0, 1.0, 1.5, NAN], device=device(name))
    with backend(name):
        codes = derivative.encode(x, [-1.0, 1.0], parity="band")
        assert derivative.decode(codes, [0.0, 1.0], 6).tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.skipif(library() is None, reason="no C++ library")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_every_half_goes_through_float_and_back():
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    one = torch.zeros((256, 32), dtype=torch.uint8)
    for level in (1.0, 0.3, 3.0, 2.0**-12):
        results = []
        for choice in ("reference", "cpu"):
            with backend(choice):
                results.append(derivative.backward(x, one, [level, 0.0]))
        assert torch.equal(results[0].isnan(), results[1].isnan())
        assert torch.equal(*(y.nan_to_num(7.0) for y in results))


def test_wrong_input_is_named():
    x = torch.zeros(4)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        derivative.encode(torch.zeros(4, dtype=torch.int64), [0.0])
    with pytest.raises(TypeError, match=r"torch\.bool"):
        derivative.backward(x > 0, derivative.encode(x, [0.0]), [0.0, 1.0])
    with pytest.raises(ValueError, match="2 boundaries"):
        derivative.encode(x, [0.0, 1.0])
    with pytest.raises(
        ValueError, match="3 boundaries or levels given; allowed: 2, 4, 8, 16, 32, 64, 128, 256"
    ):
        derivative.decode(torch.zeros(1, 32, dtype=torch.uint8), [0.0, 1.0, 2.0], 4)

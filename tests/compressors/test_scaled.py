"""Normalisations per tensor, row, column, both, and groups of both."""

import math

import pytest
import torch

from memtrain.compressors import Block, Key, Scaled
from memtrain.compressors.scaled import NORMALISATIONS
from memtrain.kernels.dispatch import backend

SHAPES = [(1000, 77), (64, 3, 7, 7), (4099,), (500, 3), (1, 901), (), (0,), (0, 4), (4, 0)]


def round_trip(compressor, x, key=None):
    return compressor.decompress(compressor.compress(x, key=key or Key()))


def scales(kind, x, group=128):
    """Each element's scale, written out from the definition."""
    x = x.abs()
    rest = [d for d in range(x.dim()) if d != 1]
    row = x.amax(list(range(1, x.dim())), keepdim=True)
    if kind == "tensor":
        return x.max().expand(x.shape)
    if kind == "dim0":
        return row.expand(x.shape)
    if kind == "dim1":
        return x.amax(rest, keepdim=True).expand(x.shape)
    if kind == "dim01":
        return row * (x / row).amax(rest, keepdim=True)
    if kind == "dim10":
        col = x.amax(rest, keepdim=True)
        return col * (x / col).amax(list(range(1, x.dim())), keepdim=True)
    matrix = x.reshape(x.shape[0], -1)
    out = torch.empty_like(matrix)
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            g, h = i // group * group, j // group * group
            out[i, j] = min(matrix[i, h : h + group].max(), matrix[g : g + group, j].max())
    return out.view(x.shape)


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("shape", [(20, 31), (6, 5, 3, 2), (1, 40), (40, 1)])
def test_error_is_half_a_step_of_the_elements_scale(kind, shape):
    x = torch.rand(shape) * torch.rand(shape[0]).view(-1, *[1] * (len(shape) - 1)) + 1e-3
    compressor = Scaled(normalisation=kind, map="Linear", bits=5, group_size=8)
    scale = scales(kind, x, 8)
    room = torch.where(x < scale / 32, scale / 32, scale / 64)
    assert ((round_trip(compressor, x) - x).abs() <= room + 1e-6 * scale).all()


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("map", ["DE", "E2M1"])
def test_signed_maxima_are_exact_and_signs_are_kept(kind, map):
    x = torch.randn(33, 40)
    x.view(-1)[x.abs().argmax()].abs_()  # DE has +1 and no -1
    back = round_trip(Scaled(normalisation=kind, map=map, signed=True), x)
    top = x.argmax()
    assert back.view(-1)[top].item() == pytest.approx(x.max().item(), rel=2**-21)
    kept = back != 0
    assert torch.equal(back[kept].sign(), x[kept].sign())


def test_by_hand():
    x = torch.tensor([[4.0, 2.0], [1.0, 1.0]])
    want = {
        "tensor": [[4.0, 2.0], [1.0, 1.0]],
        "dim0": [[4.0, 2.0], [1.0, 1.0]],
        "dim1": [[4.0, 2.0], [1.0, 1.0]],
        # rows 4 and 1 leave [1, 1/2] and [1, 1], whose columns are 1 and 1
        "dim01": ([4.0, 1.0], [1.0, 1.0]),
        # columns 4 and 2 leave [1, 1] and [1/4, 1/2], whose rows are 1 and 1/2
        "dim10": ([1.0, 0.5], [4.0, 2.0]),
    }
    for kind, answer in want.items():
        compressor = Scaled(normalisation=kind, bits=2)
        packed = compressor.compress(x, key=Key())
        if isinstance(answer, tuple):
            assert packed.tensors["row"].tolist() == answer[0]
            assert packed.tensors["col"].tolist() == answer[1]
        assert compressor.decompress(packed).tolist() == x.tolist()


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_are_truly_compressed(kind, shape):
    x = torch.rand(shape)
    compressor = Scaled(normalisation=kind)
    packed = compressor.compress(x, key=Key())
    assert compressor.decompress(packed).shape == x.shape
    assert packed.tensors["codes"].numel() == -(-x.numel() // 128) * 64
    sides = {"tensor": 1, "dim0": shape[0] if shape else 0, "dim1": (*shape, 0, 0)[1]}
    if kind in sides and (kind == "tensor" or len(shape) > 1):
        assert packed.tensors["scale"].numel() == sides[kind]


@pytest.mark.parametrize("kind", [k for k in NORMALISATIONS if k != "tensor"])
def test_one_dimension_is_quantised_in_blocks(kind):
    x = torch.rand(300)
    block = Block(map="Linear", signed=False)
    assert torch.equal(round_trip(Scaled(normalisation=kind), x), round_trip(block, x))


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zeros_stay_zeros(kind, rounding):
    compressor = Scaled(normalisation=kind, map="DE", bits=5, rounding=rounding)
    assert not round_trip(compressor, torch.zeros(20, 31)).any()
    x = torch.rand(20, 31)
    x[3], x[:, 4] = 0, 0
    back = round_trip(compressor, x)
    assert back.isfinite().all()
    assert not back[3].any()
    assert not back[:, 4].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", NORMALISATIONS)
def test_bad_numbers_spoil_what_shares_their_scale(kind, bad):
    x = torch.rand(20, 31) + 0.5
    x[3, 4] = bad
    back = round_trip(Scaled(normalisation=kind, group_size=8), x)
    fine = torch.ones(20, 31, dtype=torch.bool)
    if kind in ("dim0", "dim01", "dim10"):
        fine[3] = False
    if kind in ("dim1", "dim01", "dim10"):
        fine[:, 4] = False
    if kind == "tensor":
        fine[:] = False
    fine[3, 4] = False
    assert not back[3, 4].isfinite()
    assert ((back - x)[fine].abs() <= 1.5 / 32 + 1e-6).all()
    assert back[fine].isfinite().all()


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_c_library_equals_the_reference(kind, bits, rounding):
    x = torch.randn(6, 5, 7)
    compressor = Scaled(
        normalisation=kind, map="DE", bits=bits, signed=True, rounding=rounding, group_size=16
    )
    results = []
    for name in ("reference", "cpu"):
        with backend(name):
            packed = compressor.compress(x, key=Key(seed=3))
            results.append((packed.tensors["codes"], compressor.decompress(packed)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", NORMALISATIONS)
def test_stochastic_rounding_has_the_tensor_as_its_mean(kind):
    x = torch.rand(8, 16) * 0.9 + 0.1
    compressor = Scaled(normalisation=kind, rounding="stochastic", bits=4, group_size=4)
    draws = 300
    mean = torch.stack([round_trip(compressor, x, Key(seed=s)) for s in range(draws)]).mean(0)
    scale = scales(kind, x, 4)
    inside = x > scale / 16  # below the lowest value there is no lower neighbour
    # a step of 1/16, half of it at most as deviation, five of them
    assert ((mean - x).abs() <= 5 * scale / 32 / math.sqrt(draws) + 1e-5)[inside].all()


@pytest.mark.parametrize(
    "fields", [{"normalisation": "row"}, {"bits": 9}, {"rounding": "up"}, {"group_size": 0}]
)
def test_bad_fields_raise(fields):
    with pytest.raises(ValueError, match=r"allowed|must be"):
        Scaled(**fields)

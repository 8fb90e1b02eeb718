"""What every registered compressor keeps to. A new one adds one row to ROWS."""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass

import pytest
import torch
from torch import Tensor

from memtrain.compressors import COMPRESSORS, Compressor, Group, Key, Samples
from memtrain.precision import FORMATS, FloatFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(), (0,), (1,), (7,), (257,), (3, 5, 7), (2, 300), (0, 4), (33, 40)]


def normal(shape, dtype):
    return torch.randn(shape).to(dtype)


def positive(shape, dtype):
    return torch.rand(shape).to(dtype)


def integers(shape, dtype):
    return torch.randint(0, 100, shape).to(dtype)


@dataclass(frozen=True)
class Row:
    """One compressor: fields of its instances, its inputs, and what differs from the usual."""

    make: Callable[[tuple[int, ...], torch.dtype], Tensor] = normal
    options: tuple[dict, ...] = ({},)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    least_dimensions: int = 0


GROUPS = (
    {"bits": 3},
    {"bits": 4, "rounding": "nearest"},
    {"bits": 8},
    {"bits": 1},
)
BLOCKS = (
    {},
    {"rounding": "stochastic"},
    {"bits": 3, "map": "Power-2"},
    {"bits": 8, "rounding": "stochastic"},
    {"block_size": 24, "map": "E2M1"},
)
DRAWN = FloatFormat(4, 3, rounding="stochastic")
ROWS = {
    "identity": Row(),
    "derivative": Row(),
    "group": Row(options=GROUPS, dtypes=(*FLOATS, torch.float64)),
    "samples": Row(options=({"bits": (4, 2, 1)}, {"bits": (3,), "group_size": 64})),
    "host": Row(options=({"inner": Group(bits=4)}, {"inner": Samples()})),
    "integers": Row(
        make=integers,
        options=({"limit": 100}, {"limit": 300}),
        dtypes=(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ),
    "block": Row(options=BLOCKS, dtypes=(*FLOATS, torch.float64)),
    "patch": Row(options=({}, {"rounding": "stochastic"}), dtypes=(*FLOATS, torch.float64)),
    "rank1": Row(
        make=positive,
        options=({}, {"rounding": "stochastic"}, {"map": "Power-2", "bits": 5}),
        dtypes=(*FLOATS, torch.float64),
    ),
    "factored": Row(make=positive, least_dimensions=2),
    "lloyd_max": Row(least_dimensions=2),
    "float": Row(
        options=({}, *({"format": f} for f in FORMATS if f != "fp8_forward"), {"format": DRAWN}),
    ),
}

CASES = [
    pytest.param(COMPRESSORS[name](**options), row, id=f"{name}-{options}" if options else name)
    for name, row in ROWS.items()
    if name in COMPRESSORS
    for options in row.options
]
every_case = pytest.mark.parametrize(("compressor", "row"), CASES)


def inputs(row):
    """Every shape that the compressor takes in every dtype, and two that are not contiguous."""
    for dtype in row.dtypes:
        for shape in SHAPES:
            if len(shape) >= row.least_dimensions:
                yield row.make(shape, dtype)
        yield row.make((20, 31), dtype).t()
        yield row.make((9, 64), dtype)[::2, ::3]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_the_table_has_every_registered_compressor():
    assert COMPRESSORS.keys() <= ROWS.keys()


@every_case
def test_a_payload_has_the_parts_that_are_declared(compressor, row):
    for x in inputs(row):
        assert compressor.compress(x, key=Key()).tensors.keys() <= {*compressor.parts}


@every_case
def test_is_a_frozen_value(compressor, row):
    assert isinstance(compressor, Compressor)
    assert is_dataclass(compressor)
    assert hash(compressor) == hash(type(compressor)(**vars(compressor)))
    with pytest.raises(AttributeError):
        compressor.another = 1


@pytest.mark.parametrize("name", ["group", "patch"])
def test_gradients_do_not_follow(name):
    x = torch.randn(2, 8, 8, requires_grad=True)
    packed = COMPRESSORS[name]().compress(x * 2, key=Key())
    assert not any(part.requires_grad for part in packed.tensors.values())
    assert not COMPRESSORS[name]().decompress(packed).requires_grad


@every_case
def test_a_payload_of_another_size_is_refused(compressor, row):
    x = next(x for x in inputs(row) if x.numel() > 1000)
    packed = compressor.compress(x, key=Key())
    for name, part in packed.tensors.items():
        if not part.numel():
            continue
        shorter = {**packed.tensors, name: part.flatten()[:-1]}
        lacking = {key: other for key, other in packed.tensors.items() if key != name}
        for tensors in (shorter, lacking):
            with pytest.raises(
                ValueError, match=rf"'{name}' .* needs [\d,]+ for a tensor of shape"
            ):
                compressor.decompress(packed._replace(tensors=tensors))
    with pytest.raises(ValueError, match=r"for a tensor of shape \(1000, 1000\)"):
        compressor.decompress(packed._replace(shape=torch.Size([1000, 1000])))

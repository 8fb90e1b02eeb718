"""The two ops of compiled graphs: their random bits, whatever order a compiler runs them in."""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch

from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.flatten import flatten
from memtrain.compressors import Group
from memtrain.compressors.log_group import of_logarithms
from memtrain.kernels.dispatch import backend


def ops(form, key, dtype):
    """Functions that compress and decompress, as graphs call them."""
    return (
        lambda x: payload_ops.compress_op(x, form, key),
        lambda parts, shape: payload_ops.decompress(parts, form, shape, dtype),
    )


class Forwards(SimpleNamespace):
    __hash__ = object.__hash__


def codes(forwards, graph, places):
    """Payloads of a graph's run, by the places of its ops, in the order in which those run."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    group = Group(bits=2)
    form = payload_ops.signature_of(group, flatten(x)[1], Group.parts)
    counter = payload_ops.counter_of(forwards)
    found = {
        place: payload_ops.compress_op(x, form, (0, place, counter, graph, place))[0]
        for place in places
    }
    return torch.stack([found[place] for place in sorted(places)])


def test_runs_of_a_graph_round_equally_in_any_order_and_count_once():
    graph, other = payload_ops.graph_number(), payload_ops.graph_number()
    runs = []
    for order in ([0, 1, 2], [2, 0, 1]):
        forwards = Forwards(step=5)
        first, second = codes(forwards, graph, order), codes(forwards, graph, order[::-1])
        third = codes(forwards, other, [3, *order])
        assert forwards.step == 8
        runs.append((first, second, third[:3]))
    assert all(map(torch.equal, *runs))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][1], runs[0][2])


def test_a_run_that_broke_off_does_not_reach_into_the_next():
    forwards, graph = Forwards(step=0), payload_ops.graph_number()
    codes(forwards, graph, [0, 1])  # of 3
    forwards.step = 7  # a forward began, or a checkpoint was loaded
    found = codes(forwards, graph, [2, 0, 1])
    assert forwards.step == 8
    assert torch.equal(found, codes(Forwards(step=7), graph, [0, 1, 2]))


VIEWS = {
    "dense": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "third of a projection": lambda x: x.repeat(1, 1, 3)[..., 64:128].unflatten(2, (4, 16)),
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "strided": lambda x: x[:, ::2],
    "one number": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize(
    "compressor", [Group(bits=2), Group(whole_rows=True), Group(bits=8)], ids=repr
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_kernels_that_are_remembered_make_what_the_compressor_makes(view, dtype, compressor):
    x = VIEWS[view](torch.randn(2, 9, 64).to(dtype))
    compressor = compressor.for_saved(x.shape)
    form = payload_ops.signature_of(compressor, flatten(x)[1], compressor.parts)
    key = 3, 5, 0, 0, 0
    with backend("reference"):
        parts = payload_ops.compress_op(x, form, key)
        expected = payload_ops.decompress(parts, form, x.shape, dtype)
    compress, decompress = ops(form, key, dtype)
    for _ in range(3):  # the first finds the kernels
        assert all(map(torch.equal, compress(x), parts))
        again = decompress(parts, x.shape)
        assert torch.equal(again, expected)
        assert again.stride() == expected.stride()


@pytest.mark.parametrize(
    ("traced", "given"),
    [
        (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        (lambda x: x, lambda x: x.repeat(1, 1, 3)[..., :16].permute(0, 2, 1).permute(0, 2, 1)),
        (lambda x: x, lambda x: x.transpose(1, 2).repeat(1, 1, 3)[..., :64].transpose(1, 2)),
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x),
        (lambda x: x, lambda x: x[:, :1].expand(-1, 64, -1)),
    ],
)
def test_a_tensor_that_lies_otherwise_than_when_it_was_traced_comes_back(traced, given):
    x = given(torch.randn(4, 64, 16))
    form = payload_ops.signature_of(
        Group(bits=8), flatten(traced(torch.zeros(x.shape)))[1], Group.parts
    )
    compress, decompress = ops(form, (0, 0, 0, 0, 0), x.dtype)
    for one in (x, x, traced(x.contiguous()), x):
        assert (decompress(compress(one), one.shape) - one).abs().max() < 0.1


def test_shapes_and_backends_may_vary_at_one_place():
    group = Group(bits=8)
    form = payload_ops.signature_of(group, flatten(torch.zeros(4, 256))[1], Group.parts)
    compress, decompress = ops(form, (0, 0, 0, 0, 0), torch.float32)
    for rows in (4, 4, 9, 0, 4):
        x = torch.randn(rows, 256)
        with backend("reference"):
            expected = compress(x)
            back = decompress(expected, x.shape)
        parts = compress(x)
        assert all(map(torch.equal, parts, expected))
        assert torch.equal(decompress(parts, x.shape), back)
        assert (back - x).abs().max() < 0.1 if rows else back.shape == (0, 256)


def test_a_compressor_that_is_defined_again_under_one_text_has_its_own_kernels():
    def defined(sign):
        @dataclass(frozen=True)
        class Signed(Group):
            def decompress(self, packed):
                return sign * super().decompress(packed)

        return Signed(bits=8)

    x, ways = torch.ones(64, 64), {}
    for sign in (1.0, -1.0):
        form = payload_ops.signature_of(defined(sign), flatten(x)[1], Group.parts)
        if form not in ways:  # code that was loaded stays
            ways[form] = ops(form, (0, 0, 0, 0, 0), x.dtype)
        compress, decompress = ways[form]
        for _ in range(2):
            assert torch.equal(decompress(compress(x), x.shape), sign * x)
    assert len(ways) == 1


def test_unequal_compressors_have_unequal_forms():
    """Graphs know a form by its text: of equal texts, the last one's compressor would serve."""
    layout, group = flatten(torch.zeros(2, 3))[1], Group(bits=8)
    forms = {
        payload_ops.signature_of(one, layout, one.parts) for one in (group, of_logarithms(group))
    }
    assert len(forms) == 2
    assert [field.name for field in fields(Group) if field.compare and not field.repr] == []

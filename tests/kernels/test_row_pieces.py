"""A step from a gradient in pieces of rows: bit for bit the step from the whole one."""

import copy
import math

import pytest
import torch

from memtrain.kernels.dispatch import backend, simulating
from memtrain.kernels.step.codecs import EXACT, FACTORED, LLOYD_MAX, Codec
from memtrain.kernels.step.row_pieces import RowPieces, rows_at_once, step
from memtrain.kernels.step.split import PLAIN, MasterWeight
from memtrain.kernels.step.step import Entry, fused_step
from memtrain.kernels.step.update_rules import adamw, lion, sgd

B4, B8 = Codec("block", 4, "DE"), Codec("block", 8, "DE")
V4, V8 = Codec("block", 4, "DE-0", False), Codec("block", 8, "DE-0", False)
FORMS = {
    "exact": ("adamw", (EXACT, EXACT)),
    "4 bits": ("adamw", (B4, V4)),
    "8 bits": ("adamw", (B8, V8)),
    "rank-1": ("adamw", (B4, Codec("rank1", 4, "Linear", False))),
    "factored": ("adamw", (B4, FACTORED)),
    "8 bits, factored": ("adamw", (B8, FACTORED)),
    "2 bits": ("adamw", (LLOYD_MAX, FACTORED)),
    "lion": ("lion", (B4,)),
    "sgd": ("sgd", (B8,)),
    "no state": ("sgd", ()),
}
MASTERS = {
    "float32": (torch.float32, lambda shape: PLAIN),
    "bf16": (torch.bfloat16, lambda shape: PLAIN),
    "bf16+sr": (torch.bfloat16, lambda shape: MasterWeight(None, True, 12345)),
    "bf16+8": (torch.bfloat16, lambda shape: corrections(shape, torch.int8)),
    "fp16+16": (torch.float16, lambda shape: corrections(shape, torch.int16)),
}
SCALARS = {
    "adamw": adamw(3, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1),
    "lion": lion(lr=1e-2, betas=(0.9, 0.99)),
    "sgd": sgd(lr=1e-2, momentum=0.9),
}


def corrections(shape, dtype):
    return MasterWeight(torch.randint(-100, 100, shape, dtype=dtype))


def payload(codec, shape):
    if codec.form == "exact":
        return {"tensor": torch.rand(shape)}
    found = {name: torch.rand(size) for name, size in codec.sizes(shape).items()}
    if codec.form != "factored":
        size = codec.block * codec.bits // 8
        found["codes"] = torch.randint(0, 256, (len(found["codes"]) // size, size)).byte()
    if codec.form == "lloyd_max":
        found["scale"] = found["scale"].bfloat16()
    return found


def entry_of(form, master, shape, dtype=None):
    torch.manual_seed(0)
    rule, codecs = FORMS[form]
    weight, kept = MASTERS[master]
    shape = torch.Size(shape)
    grad = torch.randn(shape).to(dtype or weight)
    states = tuple(payload(codec, shape) for codec in codecs)
    scalars = sgd(lr=1e-2, momentum=0.0) if form == "no state" else SCALARS[rule]
    return Entry(
        torch.randn(shape).to(weight), grad, states, codecs, rule, scalars, None, kept(shape)
    )


def tensors(entry):
    found = [entry.param, *(x for state in entry.states for x in state.values())]
    return [*found, *(x for x in [entry.master.correction] if x is not None)]


def step_in_pieces(entry, nbytes, measure=None, place=torch.clone):
    seen, whole = [], entry.grad

    def make(begin, end):
        seen.append((begin, end))
        return place(whole[begin:end])

    pieces = RowPieces(make, entry.param, rows_at_once(entry, nbytes), measure)
    pieces.changed(lambda piece: piece, whole.dtype)
    step(entry._replace(grad=torch.zeros(()).expand(whole.shape)), pieces)
    return seen, pieces


def check(form, master, shape, nbytes, dtype=None, measure=None, place=torch.clone):
    whole = entry_of(form, master, shape, dtype)
    apart = copy.deepcopy(whole)
    fused_step([whole])
    seen, _ = step_in_pieces(apart, nbytes, measure, place)
    assert len(set(seen)) > 1
    for one, other in zip(tensors(apart), tensors(whole), strict=True):
        assert torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return seen


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("form", FORMS)
def test_pieces_equal_the_whole(form, master):
    with backend("cpu"):
        seen = check(form, master, (600, 256), 2**16)
        check(form, master, (300, 33), 1, dtype=torch.float32)  # rows that share blocks
    assert len(seen) == len(set(seen)) * (1 + (FORMS[form][1][-1:] in ((FACTORED,), (RANK1,))))


RANK1 = FORMS["rank-1"][1][1]


def test_triton_pieces_equal_the_whole():
    with backend("triton"):
        check("factored", "bf16+sr", (260, 16), 1)


def off_16_bytes(piece):
    return torch.cat([piece.new_zeros(1), piece.flatten()])[1:].view(piece.shape)


def test_triton_pieces_may_lie_anywhere():
    with backend("triton"):
        check("factored", "float32", (260, 16), 1, place=off_16_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(600, 128), (1100, 24)])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("form", FORMS)
def test_all_triton_pieces_equal_the_whole(form, master, shape):
    with backend("triton"):
        check(form, master, shape, 1)


NOT_FINITE = [(form, "cpu") for form in ("4 bits", "rank-1", "factored", "2 bits")]
NOT_FINITE += [pytest.param(form, "triton", marks=pytest.mark.nightly) for form, _ in NOT_FINITE]


@pytest.mark.parametrize(("form", "name"), NOT_FINITE)
def test_a_norm_that_is_not_finite_changes_nothing(form, name):
    entry = entry_of(form, "bf16+8", (300, 128))
    entry.grad[299, 127] = math.inf  # of the last piece
    before = copy.deepcopy(tensors(entry))
    with backend(name):
        _, pieces = step_in_pieces(entry, 1, torch.linalg.vector_norm)
    assert pieces.norm.isinf()
    held = tensors(entry)
    if form == "2 bits" and name == "triton":  # roots, computed again from the old factors
        held, before = ([x for x in xs if x.shape not in ((300,), (128,))] for xs in (held, before))
    assert all(map(torch.equal, held, before))


def test_the_norm_is_that_of_the_whole_and_costs_no_pass_of_its_own():
    with backend("cpu"):
        entry = entry_of("factored", "float32", (600, 256))
        whole = torch.linalg.vector_norm(entry.grad.double())
        seen, pieces = step_in_pieces(entry, 2**16, torch.linalg.vector_norm)
        assert len(seen) == 2 * len(set(seen)) == 20
        assert pieces.norm.item() == pytest.approx(whole.item(), rel=1e-6)
        assert len(step_in_pieces(entry_of("4 bits", "float32", (600, 256)), 2**16)[0]) == 10


def test_what_no_kernel_takes_in_pieces_is_whole():
    entry = entry_of("4 bits", "float32", (600, 256))
    assert rows_at_once(entry, 2**16) == 64
    assert rows_at_once(entry, 2**20) == 0  # one piece
    assert rows_at_once(entry._replace(param=entry.param.t(), grad=entry.grad.t()), 2**16) == 0
    assert rows_at_once(entry._replace(param=entry.param.double()), 2**16) == 0
    assert rows_at_once(entry._replace(param=entry.param.view(600, 16, 16)), 2**16) == 0
    with backend("reference"):
        assert rows_at_once(entry, 2**16) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cols", [256, 384, 640, 1000])
def test_a_step_that_is_simulated_for_cuda_has_the_pieces_of_one_there(form, cols):
    entry = entry_of(form, "bf16", (600, cols))
    with simulating("cuda"):  # triton need not be there
        found = rows_at_once(entry, 2**10)
    assert found >= 256
    with simulating():
        assert rows_at_once(entry, 2**10) < found
    pytest.importorskip("triton")
    with backend("triton"):
        assert rows_at_once(entry, 2**10) == found

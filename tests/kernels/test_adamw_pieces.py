"""AdamW of an 8-bit first and a factored second moment: pieces equal to the reference's whole."""

import copy

import pytest
import torch

from memtrain.kernels.dispatch import backend
from memtrain.kernels.step import pieces
from memtrain.kernels.step.step import fused_step
from memtrain.kernels.step.update_rules import adamw
from tests.kernels import test_adamw, test_entries


def run(name, entry):
    after = copy.deepcopy(entry)
    with backend(name):
        fused_step([after])
    return after


# within a row, whole rows, one piece; the last one is not whole
@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("shape", [(3, 2100), (70, 90), (6, 5, 7)])
@pytest.mark.parametrize("options", test_adamw.NUMBERS.values(), ids=test_adamw.NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_equal_the_whole(name, shape, options, dtype, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1024)
    before = test_entries.factored8(shape)
    param, grad = before.param.to(dtype), before.grad.to(dtype)
    before = before._replace(scalars=test_adamw.hyper(**options), param=param, grad=grad)
    got, want = run(name, before), run("reference", before)
    rounding = max(shape[0], before.param[:1].numel()) * 2.0**-24  # of the sums, each term
    for part in ("row", "col"):
        assert torch.allclose(got.states[1][part], want.states[1][part], rtol=rounding, atol=0)
    assert all(torch.equal(got.states[0][part], want.states[0][part]) for part in got.states[0])
    eps = torch.finfo(dtype).eps
    update = (want.param.double() - before.param.double()).abs()
    room = (rounding + 4 * 2.0**-23) * update + eps * want.param.double().abs() + 1e-30
    assert ((got.param.double() - want.param.double()).abs() <= room).all()


@pytest.mark.parametrize("form", test_entries.FORMS)
def test_split_weights_of_pieces(form, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1024)
    with backend("cpu"):
        whole = [test_entries.halved(test_entries.factored8((3, 2100)), form, 9)]
        test_entries.check_equal_to_a_step_of_the_master(whole, form)


def test_worked_case():
    # the first step from nothing: m = 0.1 g and v = 0.001 g^2, so lr * sign(g) where g^2 has rank 1
    grad = torch.tensor([[0.5, -1.0], [-1.0, 2.0]])
    entry = test_entries.factored8((2, 2))._replace(
        param=torch.zeros(2, 2),
        grad=grad,
        scalars=adamw(1, lr=0.25, betas=(0.9, 0.999), eps=0.0),
        states=(
            {"codes": torch.full((1, 256), 128, dtype=torch.uint8), "scale": torch.zeros(1)},
            {"row": torch.zeros(2), "col": torch.zeros(2)},
        ),
    )
    after = run("cpu", entry)
    assert torch.allclose(after.param, -0.25 * grad.sign(), rtol=1e-6, atol=0)
    assert torch.allclose(after.states[1]["row"], 0.001 * torch.tensor([0.625, 2.5]))
    assert after.states[0]["scale"].item() == pytest.approx(0.2)

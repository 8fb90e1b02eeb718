"""AdamW4bit: the contracts of torch.optim.AdamW, with moments in 4 bits."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from memtrain.kernels.dispatch import backend
from memtrain.optim import (
    AdamW4bit,
    AdamW4bitFactor,
    AdamW8bitFactor,
    Choice,
    compress,
    describe,
    predict,
    restore,
    state_bytes,
)

SECONDS = ["Rank-1/Linear", "B128/Linear", "factored"]
BLOCKS = 12


def gpt2_shapes():
    block = [(768,)] * 6 + [(768, 2304), (2304,), (768, 768), (768, 3072), (3072,), (3072, 768)]
    return [(50257, 768), (1024, 768), *block * BLOCKS, (768,), (768,)]


def parameter(*shape, scale=0.1):
    param = nn.Parameter(torch.randn(shape) * scale)
    param.grad = torch.randn(shape)
    return param


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("maximize", [False, True], ids=["min", "max"])
def test_first_step_equals_torchs(decoupled, maximize):
    # the moments are quantised after the update, so the first step is the exact one
    for second in SECONDS[:2]:
        ours = parameter(100, 80)
        theirs = nn.Parameter(ours.detach().clone())
        theirs.grad = ours.grad.clone()
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        kind([theirs], lr=0.1, weight_decay=0.1, maximize=maximize).step()
        AdamW4bit(
            [ours],
            lr=0.1,
            weight_decay=0.1,
            maximize=maximize,
            decoupled_weight_decay=decoupled,
            second=second,
        ).step()
        # |p| < 1 and a step of 0.1: a few roundings of 2**-24 relative each
        assert (ours - theirs).abs().max() < 16 * 2**-24


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(name, marks=() if name == "Rank-1/Linear" else pytest.mark.nightly)
        for name in SECONDS
    ],
)
def test_converges_as_torchs_adamw(second):
    def run(make):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        x = torch.randn(256, 64)
        y = torch.sin(x @ torch.randn(64, 64) / 8)
        optimizer = make(net.parameters())
        losses = []
        for _ in range(150):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0], losses[-1]

    start, plain = run(lambda p: torch.optim.AdamW(p, lr=3e-3))
    same_start, ours = run(lambda p: AdamW4bit(p, lr=3e-3, second=second))
    assert start == same_start
    assert plain < start / 20
    assert start - ours >= 0.95 * (start - plain)


@pytest.mark.parametrize("second", SECONDS)
def test_bytes_per_parameter_on_gpt2_shapes(second):
    params = [nn.Parameter(torch.empty(s, device="meta")) for s in gpt2_shapes()]
    rows = describe(AdamW4bit(params, second=second))
    per_param = sum(row.nbytes for row in rows) / sum(p.numel() for p in params)
    assert per_param <= (0.56 if second == "factored" else 1.10)


@pytest.mark.parametrize("shape", [(1000, 77), (64, 3, 7, 7), (4099,), (5000, 3), (1, 9001)])
@pytest.mark.parametrize("second", SECONDS)
def test_odd_shapes_really_compress(shape, second):
    param = parameter(*shape)
    optimizer = AdamW4bit([param], second=second)
    before = sum(row.nbytes for row in describe(optimizer))
    optimizer.step()
    assert sum(row.nbytes for row in describe(optimizer)) == before
    assert state_bytes(optimizer) == before + 4  # and the step counter
    assert before <= 1.15 * param.numel()


def test_side_vectors_that_cost_too_much_are_named():
    rows = describe(AdamW4bit([parameter(5000, 3)], second="Rank-1/Linear"))
    assert "1.33 bytes per parameter" in rows[1].reason
    assert rows[0].reason == ""


@pytest.mark.parametrize("second", SECONDS)
def test_zero_gradient_coordinates_do_not_drift(second):
    param = parameter(128, 256)
    start = param.detach().clone()
    optimizer = AdamW4bit([param], lr=0.1, weight_decay=0.0, second=second)
    for _ in range(20):
        param.grad = torch.randn_like(param)
        param.grad[5] = 0
        param.grad[:, 7] = 0
        optimizer.step()
    assert torch.equal(param[5], start[5])
    assert torch.equal(param[:, 7], start[:, 7])
    assert not torch.equal(param[6], start[6])


@pytest.mark.parametrize("second", SECONDS)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_all_zero_gradient_stays_finite(second, name):
    param = parameter(128, 256)
    start = param.detach().clone()
    param.grad.zero_()
    optimizer = AdamW4bit([param], lr=0.1, weight_decay=0.0, second=second)
    with backend(name):
        for _ in range(3):
            optimizer.step()
    assert torch.equal(param, start)


@pytest.mark.parametrize("second", SECONDS)
def test_transposed_gradients_give_the_same(second):
    a = parameter(128, 96)
    b = nn.Parameter(a.detach().clone())
    b.grad = a.grad.t().contiguous().t()
    assert b.grad.stride() != b.stride()
    AdamW4bit([a], second=second).step()
    AdamW4bit([b], second=second).step()
    assert torch.equal(a, b)


def test_transposed_and_half_precision_parameters_are_stepped():
    base = torch.randn(96, 128)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        plain = nn.Parameter(base.to(dtype, copy=True))
        strided = nn.Parameter(base.to(dtype).t().contiguous().t())
        for param in (plain, strided):
            param.grad = torch.ones_like(param)
            AdamW4bit([param], lr=0.5, weight_decay=0.0, eps=0.0).step()
        assert torch.equal(plain, strided)
        # ten roundings make the update of 0.5, one more the stored parameter
        eps = torch.finfo(dtype).eps
        expected = base.to(dtype).double() - 0.5
        assert torch.allclose(plain.double(), expected, rtol=eps / 2, atol=10 * 0.5 * eps / 2)


@pytest.mark.parametrize("second", [*SECONDS, "identity", "B2048/DE-0"])
def test_resume_is_bit_exact(second):
    def fresh():
        torch.manual_seed(0)
        params = [parameter(128, 96), parameter(7), nn.Parameter(torch.randn(80, 80).bfloat16())]
        params[2].grad = torch.randn(80, 80).bfloat16()
        return params, AdamW4bit(params, second=second)

    params, optimizer = fresh()
    for _ in range(3):
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, other = fresh()
    for param, twin in zip(params, others, strict=True):
        twin.data.copy_(param.data)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state[others[2]]["exp_avg"]["codes"].dtype == torch.uint8
    assert other.state[others[2]]["exp_avg"]["scale"].dtype == torch.float32
    for _ in range(3):
        optimizer.step()
        other.step()
    for param, twin in zip(params, others, strict=True):
        assert torch.equal(param, twin)


def test_loading_another_shapes_payload_changes_nothing():
    a, b = AdamW4bit([parameter(128, 96)]), AdamW4bit([parameter(96, 64)])
    a.step()
    b.step()
    before = copy.deepcopy(b.state_dict())
    with pytest.raises(ValueError, match="shape"):
        b.load_state_dict(a.state_dict())
    codes = [s.state_dict()["state"][0]["exp_avg"]["codes"] for s in (b,)]
    assert torch.equal(codes[0], before["state"][0]["exp_avg"]["codes"])


def test_plain_checkpoint_loads_and_restore_gives_one():
    param = parameter(128, 128)
    plain = torch.optim.AdamW([param])
    plain.step()
    ours = AdamW4bit([param])
    ours.load_state_dict(plain.state_dict())
    assert sorted(ours.state[param]["exp_avg"]) == ["codes", "scale"]
    back = restore(ours)
    assert type(back) is torch.optim.AdamW
    scale = plain.state[param]["exp_avg"].abs().max()
    # half of the widest gap of signed DE is 0.1125, below zero's 0.06 to -1 by 0.1125 as well
    error = (back.state[param]["exp_avg"] - plain.state[param]["exp_avg"]).abs().max()
    assert error <= 0.12 * scale
    back.step()


def test_plain_checkpoint_of_other_dtype_and_strides_loads_as_float32():
    param = nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    plain = torch.optim.AdamW([param])
    plain.step()
    saved = plain.state_dict()
    moments = saved["state"][0]
    moments["exp_avg"] = torch.randn(30, 20).bfloat16().t()
    ours = AdamW4bit([param])
    ours.load_state_dict(saved)
    assert ours.state[param]["exp_avg"].is_contiguous()
    assert ours.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(ours.state[param]["exp_avg"], moments["exp_avg"].float())


def test_compress_carries_state_and_predicts_what_it_makes():
    params = [parameter(128, 128), parameter(30)]
    original = torch.optim.AdamW(params, lr=0.25, betas=(0.8, 0.95), weight_decay=0.3)
    predicted = predict(original)
    original.step()
    optimizer = compress(original)
    assert isinstance(optimizer, AdamW4bit)
    assert optimizer.param_groups is original.param_groups
    assert not original.state
    assert optimizer.state[params[0]]["step"] == 1
    rows = describe(optimizer)
    assert [(r.state, r.nbytes, r.compressor) for r in rows] == [
        (r.state, r.nbytes, r.compressor) for r in predicted
    ]
    assert "30 elements <= min_elements 4096" in rows[2].reason
    optimizer.step()
    assert restore(optimizer) is original
    assert original.state[params[0]]["step"] == 2


def test_frozen_and_missing_gradients_are_skipped():
    a, b = parameter(100, 100), nn.Parameter(torch.ones(100, 100), requires_grad=False)
    optimizer = AdamW4bit([a, b])
    optimizer.step()
    assert b not in optimizer.state
    assert torch.equal(b, torch.ones(100, 100))


def test_sparse_gradients_are_refused_before_any_change():
    table = nn.Embedding(100, 64, sparse=True)
    other = parameter(100, 100)
    start = other.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        AdamW4bit([other, *table.parameters()]).step()
    assert torch.equal(other, start)


def test_infinite_gradient_spoils_its_own_element_and_block():
    param = parameter(64, 128)
    start = param.detach().clone()
    param.grad[3, 5] = math.inf
    optimizer = AdamW4bit([param], second="B128/Linear")
    optimizer.step()
    assert param.isnan().sum() == 1  # m / sqrt(v) = Inf / Inf, as in torch
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param[3].isnan().all()
    assert param[[0, 1, 2, *range(4, 64)]].isfinite().all()
    assert not torch.equal(param[0], start[0])


@pytest.mark.parametrize(
    "options",
    [{"lr": -1}, {"betas": (1.0, 0.9)}, {"eps": -1}, {"second": "Rank1/Linear"}, {"first": "x"}],
)
def test_bad_options_raise(options):
    with pytest.raises(ValueError, match=r"must be|Invalid|nearest valid name"):
        AdamW4bit([parameter(3)], **options)


def test_amsgrad_goes_to_the_general_wrapper():
    param = parameter(100, 100)
    optimizer = compress(torch.optim.AdamW([param], amsgrad=True))
    optimizer.step()
    assert not isinstance(optimizer, AdamW4bit)
    assert sorted(optimizer.state[param]["max_exp_avg_sq"]) == ["codes", "scale"]


def test_tensor_lr_and_param_groups():
    a, b = parameter(100, 100), parameter(100, 100)
    start = a.detach().clone(), b.detach().clone()
    groups = [{"params": [a], "lr": torch.tensor(0.5)}, {"params": [b], "lr": 0.0}]
    AdamW4bit(groups, weight_decay=0.0).step()
    assert torch.allclose((a - start[0]).abs(), torch.tensor(0.5), atol=1e-4)
    assert torch.equal(b, start[1])


@pytest.mark.parametrize("kind", ["exact", "block", "rank1", "factored", "B64/Linear"])
def test_a_parameter_that_grew_is_refused_before_anything_is_written(kind):
    first_weight, weight = nn.Parameter(torch.ones(64, 100)), nn.Parameter(torch.ones(64, 100))
    second = {"exact": "identity", "block": "B128/Linear", "rank1": "Rank-1/Linear"}
    first = "identity" if kind == "exact" else "B128/DE"
    optimizer = AdamW4bit(
        [first_weight, weight], first=first, second=second.get(kind, kind), min_elements=0
    )
    for param in (first_weight, weight):
        param.grad = torch.ones_like(param)
    optimizer.step()
    weight.data = torch.ones(110, 64)  # as resize_token_embeddings does
    weight.grad = torch.ones(110, 64)
    before = copy.deepcopy([first_weight.detach(), [*optimizer.state.values()]])
    with pytest.raises(ValueError, match="elements"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(110, 64))
    assert str(before) == str([first_weight.detach(), [*optimizer.state.values()]])


@pytest.mark.parametrize("kind", [AdamW4bitFactor, AdamW8bitFactor])
def test_factors_make_rare_gradients_steps_larger_by_a_root_of_the_rows(kind):
    """One element of each row and column: no moment is further from rank one."""
    weight = nn.Parameter(torch.zeros(256, 256))
    optimizer = kind([weight], lr=1e-3, weight_decay=0.0)
    weight.grad = torch.eye(256)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -16e-3 * torch.eye(256), rtol=1e-4, atol=0.0)


EIGHT = Choice(first="B256/DE", second="B256/DE-0", bits=8)


@pytest.mark.parametrize(
    ("choose", "nbytes", "share"), [(None, 0.53125, 0.9), (EIGHT, 1.015625, 0.99)]
)
def test_muon_follows_its_float32_form_with_compressed_momentum(choose, nbytes, share):
    """torch's Muon takes each momentum whole for its step, and leaves it in 4 or 8 bits."""

    def trained(pack):
        torch.manual_seed(0)
        weight, target = nn.Parameter(torch.randn(96, 128) / 10), torch.randn(96, 128) / 10
        optimizer = pack(torch.optim.Muon([weight], lr=3e-3, weight_decay=0.0))
        losses = []
        for _ in range(60):
            loss = (torch.randn(256, 128) @ (weight - target).T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0] - losses[-1], state_bytes(optimizer) / weight.numel()

    fall, whole = trained(lambda optimizer: optimizer)
    ours, kept = trained(lambda optimizer: compress(optimizer, choose))
    assert (whole, kept) == (4.0, nbytes)
    assert share * fall < ours < fall / share

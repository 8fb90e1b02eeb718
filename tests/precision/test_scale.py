"""The loss scale: true gradients outside, steps skipped on overflow, other people's scalers."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memtrain
from memtrain.config.sources import Config
from memtrain.optim.states.checkpoint_options import without
from memtrain.precision.assignment import Precision
from memtrain.precision.loss_scaling import unscale
from memtrain.precision.state import LossScale


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def data(rows=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 16, generator=generator), torch.arange(rows) % 8


def wrapped(model, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **fields):
    fields = {"assignment": "size_ordered", "ratio": 0.0, **fields}
    return memtrain.wrap(model, make(model.parameters()), Config(precision=Precision(**fields)))


def gradients(model):
    return [p.grad for p in model.parameters()]


def test_the_scale_saves_what_would_underflow():
    x, y = data()
    lost, kept = (
        wrapped(mlp(), assignment="uniform", loss_scale=how)[0] for how in ("none", "static")
    )
    for model in (lost, kept):
        (F.cross_entropy(model(x), y) * 1e-4).backward()
    # gradients near 1e-6 are below FP8's least number, 2**-16
    assert not lost[0].weight.grad.any()
    assert kept[0].weight.grad.any()


def test_a_penalty_on_weights_carries_no_scale():
    x, y = data()
    plain, model = mlp(), wrapped(mlp(), high="fp32")[0]
    for one in (plain, model):
        penalty = sum(p.square().sum() for p in one.parameters())
        (F.cross_entropy(one(x), y) + 0.1 * penalty).backward()
    for a, b in zip(gradients(plain), gradients(model), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


class Stash(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.layer, self.returned = nn.Linear(16, 8), returned

    def forward(self, x):
        y = self.layer(x)
        self.extra = y.square().mean()
        return (y, self.extra) if self.returned else y


def test_a_loss_that_is_no_output_is_warned_of_once():
    x, _ = data()
    model, _ = wrapped(Stash(False))
    with pytest.warns(UserWarning, match=r"the result of \(root\) / mean \(1 such\) outlives"):
        model(x)
    model(x)  # with warnings as errors
    returned, _ = wrapped(Stash(True))
    returned(x)
    unscaled, _ = wrapped(Stash(False), loss_scale="none")
    unscaled(x)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, (grad * ctx.saved_tensors[0]).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(16, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return Hidden.apply(self.layer(x), self.gain)


def test_a_weight_that_no_op_is_seen_to_read_is_refused():
    x, _ = data()
    model, _ = wrapped(Custom())
    with pytest.raises(RuntimeError, match=r"gain: read only by a custom.*loss_scale=none"):
        model(x)
    model, _ = wrapped(Custom(), loss_scale="none", high="fp32")
    model(x).sum().backward()
    assert torch.allclose(model.gain.grad, model.layer(x).sum(0))


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    again: list


class Returns(nn.Module):
    """A loss computed inside, and its logits, in a class that torch does not know."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, y):
        logits = self.body(x)
        return Output(F.cross_entropy(logits, y), logits, [logits])


def test_outputs_in_any_class_and_used_together():
    x, y = data()
    plain, model = Returns(), wrapped(Returns(), high="fp32")[0]
    for one in (plain, model):
        output = one(x, y)
        loss = output.loss
        loss /= 4
        logits = output.logits
        logits *= 2
        (loss + 0.01 * logits.square().mean() + 0.01 * output.again[0].mean()).backward()
    for a, b in zip(gradients(plain), gradients(model), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_inputs_have_their_true_scale():
    x, y = data()
    plain, model = mlp(), wrapped(mlp(), high="fp32")[0]
    found = []
    for one in (plain, model):
        given = x.clone().requires_grad_()
        F.cross_entropy(one(given * 2), y).backward()
        found.append(given.grad)
    assert torch.equal(*found)


def trained(model, optimizer):
    """A copy of what a step changes, without counters and the loss scale."""
    return copy.deepcopy((model.state_dict(), without(optimizer.state_dict())))


ADAM = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("make", ADAM.values(), ids=ADAM.keys())
def test_an_overflow_skips_the_step_and_halves_the_scale(make):
    x, y = data()
    model, optimizer = wrapped(mlp(), make, growth_interval=2)
    state = memtrain.precision_state(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = trained(model, optimizer)
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) * 1e9).backward()  # 1e9 * 2**16 is past 8.58e9
    assert state.scale.overflows == 1
    assert state.scale.value == 2.0**15
    lost = gradients(model)
    assert not all(grad.isfinite().all() for grad in lost)
    optimizer.step()
    assert all(a is b for a, b in zip(lost, gradients(model), strict=True))
    assert str(before) == str(trained(model, optimizer))
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert state.scale.value == 2.0**16
    assert not torch.equal(model[0].weight, before[0]["0.weight"])


@pytest.mark.each_value
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("keys", [{}, {"preset": "balanced", "weights": "bf16+8"}], ids=str)
def test_copies_of_both_skip_their_overflowed_steps(keys, copied):
    x, y = data()
    model = mlp()
    cfg = {"precision": {"assignment": "size_ordered", "ratio": 0.0}, **keys}
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
    for factor in (1.0, 1e9, 1.0):
        twins = copied((model, optimizer))
        for one, its in ((model, optimizer), twins):
            (F.cross_entropy(one(x), y) * factor).backward()
            its.step()
            its.zero_grad()
        assert str(trained(*twins)) == str(trained(model, optimizer))
    assert memtrain.precision_state(twins[0]).scale.overflows == 1
    plain = memtrain.unwrap(*twins)[1]
    assert not plain._optimizer_step_pre_hooks
    assert not plain._optimizer_step_post_hooks


def test_a_new_optimizer_of_a_copy_skips_overflowed_steps_and_no_other_does():
    x, y = data()
    model, optimizer = wrapped(mlp())
    F.cross_entropy(model(x), y).backward()
    twin = copy.deepcopy(model)
    its = torch.optim.SGD(twin.parameters(), lr=0.1)
    before = copy.deepcopy(twin.state_dict())
    (F.cross_entropy(twin(x), y) * 1e9).backward()
    optimizer.step()
    its.step()
    assert str(twin.state_dict()) == str(before)
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert len(optimizer._optimizer_step_post_hooks) == len(its._optimizer_step_post_hooks) == 1


def test_accumulated_gradients_of_which_one_overflows_are_skipped():
    x, y = data()
    model, optimizer = wrapped(mlp())
    for factor in (1e9, 1.0):
        (F.cross_entropy(model(x), y) * factor).backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_a_loss_that_is_not_finite_is_the_users():
    x, y = data()
    model, optimizer = wrapped(mlp())
    (F.cross_entropy(model(x), y) * float("nan")).backward()
    state = memtrain.precision_state(model)
    assert state.scale.overflows == 0
    assert state.scale.value == 2.0**16
    optimizer.step()
    assert model[0].weight.isnan().all()  # as without memtrain


def test_a_grad_scaler_of_the_users_own_is_honoured():
    x, y = data()
    model, optimizer = wrapped(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = memtrain.precision_state(model)
    assert not state.scale.active
    assert state.scale.value == 1.0
    assert "left to the GradScaler" in str(state)
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y) * 1e11).backward()
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, before)
    assert scaler.get_scale() == 2.0**7


def test_gradients_of_bfloat16_never_reach_torchs_op_which_has_no_such_kernel_on_cuda(monkeypatch):
    real, seen = torch._amp_foreach_non_finite_check_and_unscale_, []

    def op(grads, *numbers):
        seen.extend(grad.dtype for grad in grads)
        return real(grads, *numbers)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", op)
    x, y = data()
    for dtype in (torch.bfloat16, torch.float32):
        model, optimizer = wrapped(mlp().to(dtype), assignment="uniform")
        for factor in (1.0, 1e32):  # 1e32 * 2**16 is past 3.4e38
            (F.cross_entropy(model(x.to(dtype)), y) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert memtrain.precision_state(model).scale.overflows == 1
        assert set(seen) == {dtype} - {torch.bfloat16}


@pytest.mark.parametrize("last", [1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("before", [0.0, 1.0])
def test_gradients_of_bfloat16_are_unscaled_as_by_torchs_op(last, before):
    magnitudes = torch.logspace(-40, 38, 200).tolist()  # from subnormal numbers on
    grad = torch.tensor([0.0, *magnitudes, *(-x for x in magnitudes), last]).bfloat16()
    ours, theirs = ((grad.clone(), torch.tensor(before)) for _ in range(2))
    inverse = torch.tensor(2.0**-16)
    unscale(*ours, inverse)
    torch._amp_foreach_non_finite_check_and_unscale_([theirs[0]], theirs[1], inverse)
    assert torch.equal(ours[0].view(torch.int16), theirs[0].view(torch.int16))
    assert torch.equal(ours[1], theirs[1])


def test_a_static_scale_stays():
    scale = LossScale("static", 4.0, 1)
    scale.update(overflow=True)
    scale.update(overflow=False)
    assert (scale.value, scale.overflows) == (4.0, 1)
    assert LossScale("none", 4.0, 1).value == 1.0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(16, 16), nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        ids = (x.abs() * 5).long().clamp(max=15)
        return self.rnn(self.table(ids))[0] @ self.table.weight.T


MODELS = {
    "lstm_and_tied_table": Tied,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.PReLU(8),
        nn.ConvTranspose1d(8, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool1d(2), nn.Flatten(),
    ),
    "parametrised": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), nn.SiLU(),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.RMSNorm(8),
    ),
    "bilinear": lambda: nn.Sequential(nn.Linear(16, 16), nn.GLU(), nn.LayerNorm(8)),
}  # fmt: skip


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_every_weight_loses_the_scale_once(make):
    """With nothing rounded, gradients are plain PyTorch's: a scale left in or lost would show."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    model, _ = wrapped(model, high="fp32", loss_scale="static", initial_scale=2.0**10)
    x = torch.randn(4, 16)
    for one in (plain, model):
        one(x).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name
    low = copy.deepcopy(plain)
    low, _ = wrapped(low, assignment="uniform")
    low(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.filterwarnings("ignore:.*was skipped:RuntimeWarning")
@pytest.mark.parametrize("preset", ["balanced", "all_four", "exact"])
def test_it_goes_with_the_presets_and_skips_their_steps(preset):
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
    cfg = {"preset": preset, "precision": {"assignment": "size_ordered", "ratio": 0.5}}
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cfg)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) * 1e12).backward()
    optimizer.step()
    assert memtrain.precision_state(model).scale.overflows == 1
    for old, p in zip(before, model.parameters(), strict=True):
        assert p.isfinite().all()
        if preset != "all_four":  # there each weight is skipped whose own gradient overflowed
            assert torch.equal(old, p)
    memtrain.unwrap(model, optimizer)

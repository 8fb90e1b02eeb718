"""Gradient release: updates inside backward equal plain ones; what cannot work says so."""

import copy
import gc
import io
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from memtrain.audit.live_storages import LiveStorages
from memtrain.optim import AdamW4bit, compress
from memtrain.optim.states import checkpoint_options
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import SplitWeights

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adamw4bit": lambda p: AdamW4bit(p, lr=1e-2, min_elements=0),
    "compressed": lambda p: compress(torch.optim.RMSprop(p, lr=1e-3), min_elements=0),
}


def make(width=32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)
    )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator)


def train(model, optimizer, steps=5, between=lambda: None):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        between()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_released_equals_plain_bit_for_bit(name):
    plain, released = make(), make()
    optimizer = ReleaseGradients(OPTIMIZERS[name](released.parameters()))
    assert train(plain, OPTIMIZERS[name](plain.parameters())) == train(released, optimizer)
    for ours, theirs in zip(released.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("around", ["", "clipped", "bf16+sr"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_gradient_outlives_its_update(name, around):
    """Half of them are room for what a step makes of its own weight."""
    width, depth = 64, 16
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
    optimizer = OPTIMIZERS[name](model.parameters())
    if around == "bf16+sr":
        optimizer = SplitWeights(optimizer, around)
    optimizer = ReleaseGradients(optimizer, clip="value" if around == "clipped" else "none")
    x = torch.randn(2, width, dtype=model[0].weight.dtype)
    for _ in range(2):
        with LiveStorages() as live:
            model(x).sum().backward()
        optimizer.step()
    assert live.peak_nbytes < depth / 2 * 4 * width * width


def test_step_only_ends_the_step():
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)  # made before
    optimizer = ReleaseGradients(inner)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model(batch(0)).sum().backward()
    after = copy.deepcopy(model.state_dict())
    assert [p.numel() for p in model.parameters() if p.grad is not None] == [1]  # the kept gradient
    optimizer.step()
    scheduler.step()
    assert all(torch.equal(after[k], v) for k, v in model.state_dict().items())
    assert calls == [1]
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match="has this optimizer's states"):
        inner.step()
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # made after
    model(batch(0)).sum().backward()
    assert [p.numel() for p in model.parameters() if p.grad is not None] == [1]
    optimizer.step()
    later.step()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_tied_weight_is_updated_once_after_all_its_uses():
    plain, released = (nn.Linear(4, 4, bias=False) for _ in range(2))
    released.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4)
    optimizers = [
        torch.optim.SGD(plain.parameters(), lr=0.1),
        ReleaseGradients(torch.optim.SGD(released.parameters(), lr=0.1)),
    ]
    updates = []
    released.weight.register_post_accumulate_grad_hook(lambda p: updates.append(1))
    for model, optimizer in zip((plain, released), optimizers, strict=True):
        model(torch.tanh(model(torch.tanh(model(x))))).sum().backward()
        optimizer.step()
    assert updates == [1]
    assert torch.equal(plain.weight, released.weight)


def test_frozen_parameters_stay_and_thaw():
    model = make()
    model[0].weight.requires_grad_(False)
    optimizer = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 1)  # its gradient is applied by step(), and its hook set
    assert not torch.equal(model[0].weight, before)
    model(batch(0)).sum().backward()
    assert model[0].weight.grad is None


def test_accumulation_is_refused_before_anything_is_wrong():
    model = make()
    optimizer = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0)).sum().backward()
    once = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="cannot be accumulated"):
        model(batch(1)).sum().backward()
    assert all(torch.equal(once[k], v) for k, v in model.state_dict().items())
    optimizer.step()
    train(model, optimizer, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_that_the_backward_still_reads_when_it_was_updated_is_refused(name):
    first, second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    optimizer = ReleaseGradients(OPTIMIZERS[name]([first, second]))
    hidden = torch.randn(4, 8) @ first @ second.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (torch.tanh(hidden) @ second).sum().backward()
    assert optimizer._done == {second}


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_skips_its_parameter_and_is_counted(bad):
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = ReleaseGradients(torch.optim.SGD([a, b], lr=0.5))
    with pytest.warns(RuntimeWarning, match=r"shape \(3,\) was skipped.*NaN or Inf.*skipped"):
        (a * torch.tensor([1.0, bad, 1.0]) + b).sum().backward()
    optimizer.step()
    assert a.tolist() == [1.0, 1.0, 1.0]
    assert b.tolist() == [0.5, 0.5, 0.5]
    assert optimizer.skipped == 1
    assert optimizer.norm == pytest.approx(3**0.5)
    (a + b).sum().backward()
    optimizer.step()
    assert a.tolist() == [0.5, 0.5, 0.5]
    (a * bad).sum().backward()  # without a second warning, which would be an error here
    optimizer.step()
    assert optimizer.skipped == 2
    assert checkpoint_options.found(optimizer.state_dict())["gradients"]["skipped"] == 2


def test_clipping_by_value_and_by_each_parameters_norm():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    weight = torch.tensor([3.0, 4.0])
    optimizer = ReleaseGradients(torch.optim.SGD([a, b], lr=1.0), clip="value", limit=3.5)
    (a * weight).sum().backward()
    optimizer.step()
    assert a.tolist() == [-3.0, -3.5]
    optimizer.detach()
    optimizer = ReleaseGradients(torch.optim.SGD([a, b], lr=1.0), clip="parameter", limit=1.0)
    (a * weight + b * 0.1).sum().backward()
    optimizer.step()
    assert (a + torch.tensor([3.0, 3.5])).tolist() == pytest.approx([-0.6, -0.8], abs=1e-5)
    assert b.tolist() == pytest.approx([-0.1, -0.1])  # below the limit: left alone


def test_clipping_by_the_previous_global_norm():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = ReleaseGradients(torch.optim.SGD([a, b], lr=1.0), clip="previous", limit=2.5)
    (3.0 * a + 4.0 * b).sum().backward()  # no norm yet: each by its own
    optimizer.step()
    assert [a.item(), b.item()] == pytest.approx([-2.5, -2.5], abs=1e-4)
    assert optimizer.norm == 5.0
    (1.0 * a + 2.0 * b).sum().backward()  # halved, as 5 is twice 2.5
    optimizer.step()
    assert [a.item(), b.item()] == pytest.approx([-3.0, -3.5], abs=1e-4)
    other = ReleaseGradients(torch.optim.SGD([a, b], lr=1.0), clip="previous")
    other.load_state_dict(optimizer.state_dict())
    assert other.norm == optimizer.norm == pytest.approx(5**0.5)


def test_two_passes_clip_by_the_exact_global_norm():
    plain, released = make(), make()
    for model in (plain, released):
        model.insert(1, nn.Dropout(0.5))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    inner = torch.optim.SGD(released.parameters(), lr=0.1, momentum=0.9)
    optimizer = ReleaseGradients(inner, clip="two_pass", limit=0.01)
    for step in range(3):
        torch.manual_seed(step)
        plain_optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        plain_optimizer.step()
        torch.manual_seed(step)

        def closure(step=step):
            loss = released(batch(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer.norm == pytest.approx(norm.item(), rel=1e-5)
        for ours, theirs in zip(released.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    with pytest.raises(RuntimeError, match="closure"):
        released(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*was skipped:RuntimeWarning")
def test_two_passes_skip_the_whole_step_for_inf():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = ReleaseGradients(torch.optim.SGD([a, b], lr=0.5), clip="two_pass")
    optimizer.step(lambda: (a * torch.inf + b).sum().backward())
    assert a.tolist() == b.tolist() == [1.0, 1.0]
    assert optimizer.skipped == 1
    optimizer.step(lambda: (0.1 * a + 0.1 * b).sum().backward())
    assert a.tolist() == pytest.approx([0.95, 0.95])


@pytest.mark.parametrize("clip", ["none", "two_pass"])
def test_a_closure_that_raised_does_not_spoil_the_next_step(clip):
    model, plain = make(), make()
    optimizer, other = (
        ReleaseGradients(torch.optim.SGD(each.parameters(), lr=0.1), clip=clip)
        for each in (model, plain)
    )

    def closure(model):
        model(batch(0)).sum().backward()

    def broken():
        closure(model)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(broken)
    assert all(p.grad is None for p in model.parameters())
    model.load_state_dict(plain.state_dict())  # whatever was applied
    optimizer.step(partial(closure, model))
    other.step(partial(closure, plain))
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_grad_scaler_is_refused_and_loss_scale_serves():
    model, plain = make(), make()
    optimizer = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=1024.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"per parameter.*two_pass"):
        scaler.step(optimizer)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    (model(batch(0)).sum() * 1024.0).backward()
    optimizer.step()
    train_one = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(batch(0)).sum().backward()
    train_one.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


CLIPPERS = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    "far": lambda p: nn.utils.clip_grad_norm_(p, 1e9),
    "value": lambda p: nn.utils.clip_grad_value_(p, 1.0),
    "by hand": lambda p: [x.grad.mul_(0.5) for x in p if x.grad is not None],
    "replaced": lambda p: [setattr(x, "grad", x.grad * 0.5) for x in p if x.grad is not None],
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", CLIPPERS)
def test_clipping_what_was_applied_is_an_error_at_every_step(name, steps):
    model = make()
    optimizer = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, steps)
    with pytest.raises(RuntimeError, match=r"set release\.clip to value, .* and release\.limit"):
        train(model, optimizer, 1, between=lambda: CLIPPERS[name](list(model.parameters())))


def test_clipping_is_seen_where_the_smallest_parameter_has_no_gradient():
    model = make()
    model.append(nn.Linear(1, 1)).requires_grad_(True)
    model[4].weight.requires_grad_(False)
    optimizer = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1))
    model[:4](batch(0)).square().mean().backward()  # one of two biases of one element
    nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    with pytest.raises(RuntimeError, match=r"release\.clip"):
        optimizer.step()


def test_clipping_is_seen_through_split_weights_and_sums():
    model = make()
    inner = SplitWeights(torch.optim.AdamW(model.parameters()), "bf16+8")
    optimizer = ReleaseGradients(inner, accumulate=2)
    for step in range(2):
        model(batch(step).bfloat16()).float().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"release\.clip"):
        optimizer.step()


def test_its_own_clipping_takes_the_place_of_another_and_plain_steps_pass():
    model = make()
    clipped = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1), clip="previous")
    train(model, clipped, 2, between=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    plain, released = make(), make()
    optimizer = ReleaseGradients(torch.optim.SGD(released.parameters(), lr=0.1))
    looks = train(released, optimizer, 3, between=lambda: nn.utils.get_total_norm(
        [p.grad for p in released.parameters() if p.grad is not None]
    ))  # fmt: skip
    assert looks == train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)


def test_gradients_set_by_hand_are_applied_by_step():
    weight = nn.Parameter(torch.ones(2))
    optimizer = ReleaseGradients(torch.optim.SGD([weight], lr=0.5))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    assert weight.grad is None
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    added = optimizer.param_groups[1]["params"][0]
    added.sum().backward()
    assert added.tolist() == [0.5, 0.5]


def test_state_dict_deepcopy_and_detach():
    model = make()
    optimizer = ReleaseGradients(SplitWeights(torch.optim.AdamW(model.parameters()), "bf16+8"))
    x = batch(0).bfloat16()
    model(x).float().sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    model(x).float().sum().backward()
    optimizer.step()
    twin(x).float().sum().backward()
    twin_optimizer.step()
    again = make()
    resumed = ReleaseGradients(SplitWeights(torch.optim.AdamW(again.parameters()), "bf16+8"))
    resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(saved["model"])
    again(x).float().sum().backward()
    resumed.step()
    for ours, copied, loaded in zip(
        model.parameters(), twin.parameters(), again.parameters(), strict=True
    ):
        own = optimizer.inner.master(ours)
        assert torch.equal(own, twin_optimizer.inner.master(copied))
        assert torch.equal(own, resumed.inner.master(loaded))
    inner = optimizer.detach().restore()
    assert type(inner) is torch.optim.AdamW
    model(batch(0)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    inner.step()


def test_hooks_do_not_keep_the_optimizer_alive():
    model = make()
    optimizer = ReleaseGradients(torch.optim.SGD(model.parameters(), lr=0.1))
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    model(batch(0)).sum().backward()
    assert model[0].weight.grad is not None


def test_wrong_options_and_sparse_gradients_are_refused():
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="clip='norm' is unknown; allowed: none, value"):
        ReleaseGradients(torch.optim.SGD(params), clip="norm")
    with pytest.raises(ValueError, match="limit=0 is out of range"):
        ReleaseGradients(torch.optim.SGD(params), limit=0)
    table = nn.Embedding(4, 2, sparse=True)
    ReleaseGradients(torch.optim.SGD(table.parameters()))
    before = table.weight.clone()
    optimizer = ReleaseGradients(torch.optim.SGD(table.parameters()))
    with pytest.raises(RuntimeError, match="dense"):
        table(torch.tensor([1])).sum().backward()
    assert torch.equal(before, table.weight)
    optimizer.step()


def test_complex_parameters_are_updated_as_their_gradients_arrive():
    def make():
        generator = torch.Generator().manual_seed(0)
        return nn.Parameter(torch.randn(4, 4, dtype=torch.complex64, generator=generator))

    own, other = make(), make()
    optimizer = ReleaseGradients(torch.optim.AdamW([own]), clip="parameter", limit=0.5)
    plain = torch.optim.AdamW([other])
    for _ in range(2):
        own.abs().square().sum().backward()
        optimizer.step()
        other.abs().square().sum().backward()
        nn.utils.clip_grad_norm_([other], 0.5)
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(own, other)
    for options in ({"clip": "value"}, {"accumulate": 2}):
        inner = torch.optim.AdamW([own])
        with pytest.raises(ValueError, match=r"of shape \(4, 4\) is torch.complex64"):
            ReleaseGradients(inner, **options)
        assert "step" not in vars(inner)


def test_a_stalled_run_is_detected_by_its_steps_not_by_its_parameters(recwarn):
    weights = [nn.Parameter(torch.full((n,), 100.0, dtype=torch.bfloat16)) for n in (2, 9, 9, 3)]
    optimizer = ReleaseGradients(AdamW4bit(weights, lr=1e-3, weight_decay=0.0))
    for step in range(1, 17):
        sum(weight.sum() for weight in weights).backward()
        optimizer.step()
        found = [str(w.message) for w in recwarn if "stalled" in str(w.message)]
        assert len(found) == (step >= 8)
    assert "of shape (9,) moved at step 8" in found[0]

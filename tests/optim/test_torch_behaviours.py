"""What torch promises of its optimizers, held by every optimizer of memtrain."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import memtrain
from memtrain import optim
from memtrain.optim import ReleaseGradients, SplitWeights, compress, describe, state_bytes
from tests.optim.behaviours import (
    GENERAL,
    every,
    fused,
    make,
    make_plain,
    parameter,
    step_equally,
    twin,
)

ODD = [(1000, 77), (64, 3, 7, 7), (4099,), (5000, 3), (1, 9001)]


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_backward_that_needs_a_weight_from_before_a_step_is_refused(name, dtype):
    weight, left = parameter(128, 64, dtype=dtype), parameter(128, 64, dtype=dtype)
    optimizer = make(name, [weight, left])
    left.grad = None
    x = torch.randn(4, 64, dtype=dtype, requires_grad=True)
    for _ in range(3):  # the second and third may be made from the table of the first
        old, other = (x @ weight.t()).sum(), (x @ left.t()).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        other.backward(inputs=[x])


@every
def test_a_group_added_later_is_stepped(name):
    first, late = parameter(80, 80), parameter(70, 70)
    alone = twin(late)
    optimizer = make(name, [first])
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 0.05})
    step_equally((late, optimizer), (alone, make(name, [alone], lr=0.05)))


@every
def test_a_group_of_an_iterator_has_its_parameters(name):
    optimizer = make(name, [parameter(5)])
    more = [parameter(80, 80), parameter(5)]
    optimizer.add_param_group({"params": iter(more)})
    assert [*map(id, optimizer.param_groups[-1]["params"])] == [*map(id, more)]


@fused
def test_a_bad_option_set_later_changes_nothing(name):
    a, b = parameter(80, 80), parameter(80, 80)
    optimizer = make(name, [{"params": [a]}, {"params": [b]}])
    optimizer.param_groups[1]["lr"] = -1.0
    start = a.detach().clone()
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        optimizer.step()
    assert torch.equal(a, start)
    assert not optimizer.state


@every
def test_closures_and_hooks_run_once_and_in_order(name):
    param, calls = parameter(80, 80), []
    optimizer = make(name, [param])
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    start = param.detach().clone()
    assert torch.equal(optimizer.step(closure), start.square().sum())
    assert calls == ["pre", "closure", "post"]
    assert not torch.equal(param, start)


@every
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_equally(name, how):
    param = parameter(80, 80)
    optimizer = make(name, [param])
    optimizer.step()
    (other,), copied = how(([param], optimizer))
    other.grad = param.grad.clone()
    step_equally((param, optimizer), (other, copied))


def test_wrap_keeps_the_states_of_complex_parameters_and_lists_them():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.spectrum = nn.Parameter(torch.randn(80, 80, dtype=torch.complex64))
            self.linear = nn.Linear(80, 80)

        def forward(self, x):
            return self.linear(torch.fft.ifft(torch.fft.fft(x) @ self.spectrum).real)

    model, x = Fourier(), torch.randn(32, 80)
    plain = copy.deepcopy(model)
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "optimizer_only")
    other = torch.optim.AdamW(plain.parameters())
    kept = {e.site: e.reason for e in memtrain.plan_of(model).entries("state") if e.reason}
    assert kept["spectrum / adamw / exp_avg"] == "kept: the parameter is complex"
    for net, each in ((model, optimizer), (plain, other)):
        net(x).square().sum().backward()
        each.step()
    assert isinstance(optimizer.state[model.linear.weight]["exp_avg"], dict)
    assert optimizer.state[model.spectrum]["exp_avg"].dtype == torch.complex64
    torch.testing.assert_close(model.spectrum, plain.spectrum)
    rows = {(row.param_name, row.state): row.reason for row in describe(optimizer)}
    assert rows["0.0", "exp_avg_sq"] == "kept: the parameter is complex"
    model, optimizer = memtrain.unwrap(model, optimizer)
    optimizer.step()


@every
def test_sparse_gradients_are_refused_before_any_change(name):
    table, other = nn.Embedding(100, 64, sparse=True), parameter(80, 80)
    start = other.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        make(name, [other, *table.parameters()]).step()
    assert torch.equal(other, start)


@pytest.mark.parametrize("name", ["AdamW4bit", "SGD4bit", "Lion4bit", GENERAL])
def test_a_scheduler_moves_what_it_moves_of_torchs(name):
    """A rate, and a momentum or the first beta."""
    options = {"momentum": 0.9} if name == GENERAL else {}
    ours, plain = make(name, [parameter(80, 80)], **options), [parameter(8)]
    theirs = torch.optim.RMSprop(plain, **options) if name == GENERAL else make_plain(name, plain)
    cycles = [lr_scheduler.OneCycleLR(o, 0.1, total_steps=8) for o in (ours, theirs)]
    for _ in range(4):
        for optimizer, cycle in zip((ours, theirs), cycles, strict=True):
            optimizer.step()
            cycle.step()
        for key in ("lr", "momentum", "betas"):
            assert ours.param_groups[0].get(key) == theirs.param_groups[0].get(key)


@every
def test_grad_scaler_skips_infinite_steps_and_unscales_others(name):
    param = parameter(80, 80)
    plain = twin(param)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = make(name, [param])
    scaler.scale(torch.ones(()))  # makes its tensors
    param.grad *= 4.0
    scaler.step(optimizer)
    scaler.update()
    make(name, [plain]).step()
    assert torch.equal(param, plain)
    start, before = param.detach().clone(), copy.deepcopy(optimizer.state_dict())
    param.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(param, start)
    assert str(optimizer.state_dict()) == str(before)


@fused
def test_mixed_dtypes_step_together(name):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    together = [parameter(80, 80, dtype=dtype) for dtype in dtypes]
    separate = [twin(param) for param in together]
    make(name, together).step()
    for a, b in zip(together, separate, strict=True):
        make(name, [b]).step()
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", ODD)
@every
def test_odd_shapes_really_compress(name, shape):
    param = parameter(*shape)
    optimizer = make(name, [param])
    optimizer.step()
    kind = getattr(optim, name)
    most = 1.15 if name == GENERAL else len(kind.names) * {4: 0.575, 8: 1.1}[kind.bits]
    assert state_bytes(optimizer) - 4 <= most * param.numel()
    assert sum(row.nbytes for row in describe(optimizer)) <= most * param.numel()


@every
def test_coordinates_without_gradient_do_not_drift(name):
    param = parameter(128, 96)
    start = param.detach().clone()
    optimizer = make(name, [param], weight_decay=0.0)
    for _ in range(10):
        param.grad = torch.randn_like(param)
        param.grad[5] = 0
        param.grad[:, 7] = 0
        optimizer.step()
    assert torch.equal(param[5], start[5])
    assert torch.equal(param[:, 7], start[:, 7])
    assert not torch.equal(param[6], start[6])


@every
def test_strides_of_the_gradient_do_not_matter(name):
    a = parameter(128, 96)
    b = twin(a)
    b.grad = a.grad.t().contiguous().t()
    assert b.grad.stride() != b.stride()
    pairs = [(param, make(name, [param])) for param in (a, b)]
    step_equally(*pairs)
    step_equally(*pairs)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_stalled_run_warns_once(name, dtype, recwarn):
    param = nn.Parameter(torch.full((80, 80), 100.0, dtype=dtype))
    optimizer = make(name, [param], lr=1e-3, weight_decay=0.0)
    for _ in range(40):
        param.grad = torch.ones_like(param)
        optimizer.step()
    found = [w for w in recwarn if "stalled" in str(w.message)]
    # 0.001, and 0.01 of SGD with momentum, are below half of bfloat16's 0.5 at 100
    assert len(found) == (1 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize(
    "plain", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, optim.Lion]
)
def test_compress_picks_the_fused_twin(plain):
    options = {"momentum": 0.9} if plain is torch.optim.SGD else {}
    eight = optim.Choice(first="B256/DE", second="B256/DE-0", bits=8)
    for choose, bits in ((None, 4), (eight, 8)):
        param = parameter(80, 80)
        original = plain([param], lr=0.01, **options)
        original.step()
        optimizer = compress(original, choose)
        assert type(optimizer).__name__ == f"{plain.__name__}{bits}bit"
        optimizer.step()
        assert optim.restore(optimizer) is original
        original.step()


@every
def test_it_is_printed_with_its_groups(name):
    optimizer = make(name, [{"params": [parameter(5)]}, {"params": [parameter(6)], "lr": 0.125}])
    text = repr(optimizer)
    assert text.startswith(name)
    assert "Parameter Group 1" in text
    assert "lr: 0.125" in text
    assert "params" not in text


@pytest.mark.parametrize("name", ["AdamW4bit", "SGD8bit", "Lion4bit", GENERAL, "around"])
def test_profilers_find_its_steps_by_name(name):
    param = parameter(8, 8)
    if name == "around":
        optimizer = ReleaseGradients(SplitWeights(make("AdamW4bit", [param])))
        name = "ReleaseGradients"
        param.grad = torch.ones_like(param)
    else:
        optimizer = make(name, [param])
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = [event.name for event in profile.function_events]
    steps = [found for found in names if found.startswith("Optimizer.step#")]
    assert steps == [f"Optimizer.step#{name}.step"]  # the inner one's is no step of its own
    assert f"Optimizer.zero_grad#{name}.zero_grad" in names


@fused
@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("lr", float("nan"), "Invalid learning rate"),
        ("betas", (1.0, 0.5), "Invalid beta parameter at index 0"),
        ("min_elements", -1, "min_elements must be at least 0"),
        ("first", "x", "nearest valid name"),
    ],
)
def test_options_that_torch_does_not_check_are_refused(name, option, value, match):
    if option == "betas" and option not in inspect.signature(getattr(optim, name)).parameters:
        return
    with pytest.raises(ValueError, match=match):
        make(name, [parameter(5)], **{option: value})


@every
def test_empty_parameters_and_groups_do_nothing(name):
    empty, full = nn.Parameter(torch.zeros(0, 8)), parameter(80, 80)
    empty.grad = torch.zeros_like(empty)
    optimizer = make(name, [{"params": []}, {"params": [empty, full]}])
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert empty.shape == (0, 8)

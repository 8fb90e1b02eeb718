"""Checkpoints: bit-exact across processes, portable both ways, refused before anything changes."""

import copy
import io
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import memtrain
from memtrain.compressors import Identity
from memtrain.optim import (
    Adam4bit,
    Adam8bit,
    AdamW4bit,
    AdamW4bitFactor,
    AdamW8bit,
    AdamW8bitFactor,
    Lion,
    Lion4bit,
    Lion8bit,
    SGD4bit,
    SGD8bit,
    compress,
    describe,
    portable_state_dict,
)
from tests.equality import equal

PLAIN = {
    AdamW4bit: torch.optim.AdamW,
    AdamW4bitFactor: torch.optim.AdamW,
    AdamW8bit: torch.optim.AdamW,
    AdamW8bitFactor: torch.optim.AdamW,
    Adam4bit: torch.optim.Adam,
    Adam8bit: torch.optim.Adam,
    SGD4bit: torch.optim.SGD,
    SGD8bit: torch.optim.SGD,
    Lion4bit: Lion,
    Lion8bit: Lion,
}
SHAPES = [(80, 64), (70, 3, 5, 5), (30,)]

CHILD = """
import sys, torch
from memtrain import optim
saved = torch.load(sys.argv[1], weights_only=True)
params = [torch.nn.Parameter(p) for p in saved["params"]]
options = {"momentum": 0.9} if "SGD" in sys.argv[2] else {}
optimizer = getattr(optim, sys.argv[2])(params, lr=0.5, **options)
optimizer.load_state_dict(saved["optimizer"])
for grads in saved["grads"]:
    for param, grad in zip(params, grads):
        param.grad = grad
    optimizer.step()
assert "torch._inductor.compile_fx" not in sys.modules  # steps compile nothing
params = [p.detach() for p in params]
torch.save({"params": params, "optimizer": optimizer.state_dict()}, sys.argv[3])
"""


def make(kind, params):
    momentum = {"momentum": 0.9} if "SGD" in kind.__name__ else {}
    return kind(params, lr=0.01, weight_decay=0.1, **momentum)


def trained(kind, steps=3):
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make(kind, params)
    for _ in range(steps):
        step(optimizer, gradients())
    return params, optimizer


def gradients():
    return [torch.randn(shape) for shape in SHAPES]


def step(optimizer, grads):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize(
    "kind",
    [
        AdamW4bit,
        *(
            pytest.param(k, marks=pytest.mark.nightly)
            for k in (AdamW4bitFactor, AdamW8bit, Lion4bit, SGD8bit)
        ),
    ],
)
def test_another_process_goes_on_bit_for_bit(kind, tmp_path):
    params, optimizer = trained(kind)
    grads = [gradients(), gradients()]
    start, end = tmp_path / "start.pt", tmp_path / "end.pt"
    whole = {"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
    torch.save({**whole, "grads": grads}, start)
    command = [sys.executable, "-c", CHILD, str(start), kind.__name__, str(end)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for each in grads:
        step(optimizer, each)
    theirs = torch.load(end, weights_only=True)
    assert equal([p.detach() for p in params], theirs["params"])
    assert equal(optimizer.state_dict(), theirs["optimizer"])


@pytest.mark.parametrize("kind", PLAIN)
def test_the_plain_optimizer_loads_a_portable_one_and_steps_the_same(kind):
    params, optimizer = trained(kind)
    before = copy.deepcopy(optimizer.state_dict())
    saved = portable_state_dict(optimizer)
    assert equal(optimizer.state_dict(), before)
    twins = [nn.Parameter(p.detach().double()) for p in params]
    plain = PLAIN[kind](twins)
    plain.load_state_dict(copy.deepcopy(saved))
    grads = gradients()
    step(optimizer, grads)
    step(plain, [grad.double() for grad in grads])
    for mine, theirs in zip(params, twins, strict=True):
        # A step's dozen float32 operations, against float64, on weights of at most 8. Factored
        # states have a row's mean rounded once for each of up to 75 terms besides.
        tolerance = 100 * 2.0**-24 * 8
        if kind.__name__.startswith("Lion"):  # whose sign of nearly nothing may turn
            assert ((mine - theirs).abs() > tolerance).sum() <= 2
        else:
            assert (mine - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("kind", PLAIN)
def test_portable_states_are_plain_float32_and_load_back(kind):
    params, optimizer = trained(kind)
    saved = portable_state_dict(optimizer)
    assert "memtrain" not in saved
    for param, state in zip(params, saved["state"].values(), strict=True):
        for name in optimizer.names:
            assert state[name].dtype == torch.float32
            assert state[name].shape == param.shape
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    other = make(kind, [nn.Parameter(p.detach().clone()) for p in params])
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for param, twin in zip(params, other.param_groups[0]["params"], strict=True):
        for name in optimizer.names:
            assert type(other.state[twin][name]) is type(optimizer.state[param][name])


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_checkpoint_loads_at_any_step(kind):
    params, plain = trained(PLAIN[kind])
    optimizer = make(kind, [nn.Parameter(p.detach().clone()) for p in params])
    optimizer.load_state_dict(plain.state_dict())
    first = optimizer.param_groups[0]["params"][0]
    assert isinstance(optimizer.state[first][optimizer.names[0]], dict)
    # the smallest parameter keeps its states exactly, so it goes on as the plain one does
    grads = gradients()
    step(plain, grads)
    step(optimizer, grads)
    last = optimizer.param_groups[0]["params"][-1]
    assert torch.allclose(last, params[-1], rtol=16 * 2.0**-24, atol=16 * 2.0**-24)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64], ids=str)
def test_a_single_number_goes_on_whose_count_of_steps_has_its_shape(kind, dtype):
    param, grads = nn.Parameter(torch.ones((), dtype=dtype)), [torch.ones((), dtype=dtype)]
    optimizer = make(kind, [param])
    for _ in range(2):
        step(optimizer, grads)
    twin = nn.Parameter(param.detach().clone())
    loaded = make(kind, [twin])
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded):
        step(each, grads)
    assert torch.equal(param, twin)
    for name, state in optimizer.state[param].items():
        assert loaded.state[twin][name].dtype == state.dtype


@pytest.mark.parametrize("more", [["weights=bf16+8", "gradients=release"], ["optim.device=cpu"]])
def test_what_wrap_put_around_an_optimizer_is_looked_through(more):
    def states(*options):
        torch.manual_seed(0)
        model = nn.Linear(128, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = memtrain.wrap(model, optimizer, ["preset=optimizer_only", *options])
        for _ in range(2):
            model(torch.ones(4, 128, dtype=model.weight.dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = describe(optimizer)
        assert {id(row.param) for row in rows} == {id(p) for p in model.parameters()}
        return portable_state_dict(optimizer), [row[1:] for row in rows], model

    saved, rows, model = states(*more)
    _, alone, _ = states()
    assert rows == alone
    plain = torch.optim.AdamW([nn.Parameter(p.detach().float()) for p in model.parameters()])
    plain.load_state_dict(saved)
    for param, state in plain.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype == torch.float32
            assert state[name].shape == param.shape


SPOILT = {
    "of a newer version": lambda saved: saved["memtrain"].update(states=99),
    "without a state": lambda saved: saved["state"][0].pop("exp_avg_sq"),
    "without a scale": lambda saved: saved["state"][0]["exp_avg"].pop("scale"),
    "without a counter": lambda saved: saved["state"][1].pop("step"),
    "with fewer codes": lambda saved: saved["state"][1]["exp_avg"].update(codes=torch.zeros(9)),
    "plain, of another shape": lambda saved: saved["state"][2].update(exp_avg=torch.zeros(31)),
    "of fewer parameters": lambda saved: saved["param_groups"][0]["params"].pop(),
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("kind", [AdamW4bit, AdamW8bit])
def test_what_does_not_fit_is_refused_before_anything_changes(kind, name):
    _, optimizer = trained(kind)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["lr"] = 99.0
    SPOILT[name](saved)
    with pytest.raises(ValueError, match=r"allowed: |holds|has shape|doesn't match"):
        optimizer.load_state_dict(saved)
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("fused", [True, False])
def test_an_original_refuses_to_save_and_load_what_it_no_longer_has(fused):
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    original = torch.optim.AdamW(params, amsgrad=not fused)
    step(original, gradients())
    optimizer = memtrain.optim.compress(original)
    assert isinstance(optimizer, AdamW4bit) == fused
    saved = optimizer.state_dict()
    with pytest.raises(RuntimeError, match="states: step, save and load the optimizer that"):
        original.state_dict()  # it would be empty, and a resumed run begin anew
    with pytest.raises(RuntimeError, match="has this optimizer's states"):
        original.load_state_dict(saved)
    copied = memtrain.optim.restore(copy.deepcopy(optimizer))
    assert memtrain.optim.restore(optimizer) is original
    for whole in (original, copied):
        assert len(whole.state_dict()["state"]) == len(SHAPES)
        whole.load_state_dict(whole.state_dict())
        step(whole, gradients())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payloads_are_not_cast_to_their_parameter_on_the_way(dtype, monkeypatch):
    weight = nn.Parameter(torch.randn(256, 256, dtype=dtype))
    optimizer = AdamW4bit([weight])
    step(optimizer, [torch.randn_like(weight)])
    saved, held = optimizer.state_dict(), []
    process = torch.optim.Optimizer._process_value_according_to_param_policy

    def spy(param, value, *args, **kwargs):
        held.append(process(param, value, *args, **kwargs))
        return held[-1]

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", spy)
    optimizer.load_state_dict(saved)
    assert sum(x.numel() for x in held) == 1  # the counter of steps
    assert equal(optimizer.state_dict(), saved)


OTHER_SHAPES = [(96, 81), (1, 80), (96, 1), (7681,)]


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["Adafactor", "Rprop", "NAdam", "AdamW"])
def test_states_of_another_shape_are_refused_before_anything_is_read(kind, shape):
    def trained(weight):
        optimizer = compress(getattr(torch.optim, kind)([weight], lr=1e-2))
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        return optimizer

    torch.manual_seed(0)
    weight, other = (nn.Parameter(torch.ones(size)) for size in ((80, 96), shape))
    optimizer, target = trained(weight), trained(other)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match="shape"):
        target.load_state_dict(optimizer.state_dict())
    assert equal(target.state_dict(), before)

    weight.data = torch.ones(shape)
    weight.grad = torch.randn_like(weight)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"shape|size"):
        optimizer.step()
    assert equal(optimizer.state_dict(), before)
    assert torch.equal(weight, torch.ones(shape))


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_adafactor_steps_from_gradients_of_another_dtype(dtypes):
    """torch's Adafactor makes its states of the gradient's dtype (`grad_dtype`)."""
    dtype, of_gradient = dtypes
    weights = [nn.Parameter(torch.ones(8192, dtype=dtype)) for _ in range(2)]
    plain = torch.optim.Adafactor(weights[:1])
    kept = compress(torch.optim.Adafactor(weights[1:]), lambda param, name: Identity())
    torch.manual_seed(0)
    for _ in range(3):
        grad = torch.randn(8192, dtype=of_gradient)
        for weight in weights:
            weight.grad_dtype = of_gradient
            weight.grad = grad.clone()
        plain.step()
        kept.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("cfg", ["balanced", "all_four", ["preset=all_four", "optim.device=cpu"]])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "NAdam", "Adamax"])
def test_a_plain_optimizer_refuses_compressed_states_at_load(name, cfg):
    kind = getattr(torch.optim, name)
    model = nn.Linear(80, 80)
    model, optimizer = memtrain.wrap(model, kind(model.parameters()), cfg)
    for _ in range(3):
        model(torch.randn(4, 80)).float().sum().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    plain = kind([nn.Parameter(torch.randn(80, 80)), nn.Parameter(torch.randn(80))])
    for given in (optimizer.state_dict(), saved):
        with pytest.raises(ValueError, match=r"portable_state_dict\(optimizer\).* Steps: 3\.0"):
            plain.load_state_dict(given)
    plain.load_state_dict(portable_state_dict(optimizer))
    optimizer.load_state_dict(saved)
    assert equal(optimizer.state_dict(), saved)


def test_a_plain_optimizer_loads_states_that_are_not_compressed():
    model = nn.Linear(80, 80)
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "exact")
    model(torch.randn(4, 80)).sum().backward()
    optimizer.step()
    torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.state_dict())


def test_an_optimizer_whose_states_all_stay_whole_warns_once_after_its_first_step():
    def train(kind, cfg="balanced"):
        model = nn.Linear(80, 80)
        model, optimizer = memtrain.wrap(model, kind(model.parameters()), cfg)
        for _ in range(2):
            model(torch.randn(4, 80)).sum().backward()
            optimizer.step()

    with pytest.warns(
        RuntimeWarning, match=r"Adadelta is compressed.*acc_delta, square_avg"
    ) as all_:
        train(torch.optim.Adadelta)
    assert len(all_) == 1
    rules = [{"state": "square_avg|acc_delta", "compressor": "factored"}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(torch.optim.Adadelta, {"optim": {"rules": rules}})
        train(torch.optim.Adadelta, "exact")
        train(torch.optim.AdamW)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_a_state_dict_keeps_the_first_count_of_steps(tmp_path):
    from torch.distributed import checkpoint

    first, second = (AdamW4bit([nn.Parameter(torch.ones(64, 128))]) for _ in range(2))
    for optimizer, count in ((first, 3), (second, 1)):
        for _ in range(count):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
            optimizer.step()
    checkpoint.save({"optim": first.state_dict()}, checkpoint_id=tmp_path)
    target = {"optim": second.state_dict()}
    checkpoint.load(target, checkpoint_id=tmp_path)
    second.load_state_dict(target["optim"])
    assert [float(state["step"]) for state in second.state.values()] == [3.0]


@pytest.mark.parametrize("make", [SGD4bit, SGD8bit])
def test_a_buffer_that_is_none_is_a_first_step(make):
    """As older torch saves SGD without momentum: the first buffer is the gradient, undamped."""
    params = [nn.Parameter(torch.zeros(96, 128)) for _ in range(2)]
    for param, kind in zip(params, (make, torch.optim.SGD), strict=True):
        optimizer = kind([param], lr=0.1, momentum=0.5, dampening=0.5)
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": None}}})
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
    torch.testing.assert_close(*params)

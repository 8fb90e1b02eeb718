"""Split weights: 2-byte parameters that train as their float32 masters do."""

import copy
import pickle

import pytest
import torch
from torch import nn

from memtrain.kernels.dispatch import backend
from memtrain.optim import AdamW4bit, CompressedOptimizer, SGD4bit
from memtrain.optim.wrappers.weights import FORMATS, SplitWeights, keeps_float32

BF16 = torch.bfloat16


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40, 30), (64,), (4, 3, 2, 2), (1,)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(step, like):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(BF16) for p in like]


def run(optimizer, given, steps, first=0):
    for step in range(first, first + steps):
        for param, grad in zip(given, gradients(step, given), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "adamw4bit": lambda p: AdamW4bit(p, lr=1e-4, min_elements=0),
    "compressed": lambda p: CompressedOptimizer(torch.optim.AdamW(p, lr=1e-4), min_elements=0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sixteen_bits_train_bit_for_bit_as_float32(name):
    plain, low = params(), params()
    whole = OPTIMIZERS[name](plain)
    optimizer = SplitWeights(OPTIMIZERS[name](low), "bf16+16")
    run(whole, plain, 6)
    run(optimizer, low, 6)
    for ours, theirs in zip(low, plain, strict=True):
        assert ours.dtype == BF16
        assert torch.equal(optimizer.master(ours), theirs)
        assert torch.equal(ours, theirs.to(BF16))
    inner = optimizer.restore()
    for ours, theirs in zip(low, plain, strict=True):
        assert torch.equal(ours, theirs)  # float32 again
    run(inner, low, 2, first=6)
    run(whole, plain, 2, first=6)
    assert torch.equal(low[0], plain[0])


@pytest.mark.parametrize("weights", ["bf16+8", "bf16+sr"])
def test_triton_steps_without_masters(weights, monkeypatch):
    results = []
    for name in ("reference", "triton"):
        given = [nn.Parameter(p.detach()) for p in params()[:2]]
        optimizer = SplitWeights(SGD4bit(given, lr=0.1, momentum=0.9, min_elements=0), weights)
        monkeypatch.setattr(optimizer, "master", None)
        with backend(name):
            run(optimizer, given, 2)
        results.append([*given, *filter(torch.is_tensor, optimizer.corrections.values())])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


def test_eight_bits_stay_within_their_rounding():
    plain, low = params(), params()
    whole = torch.optim.SGD(plain, lr=1e-3)
    optimizer = SplitWeights(torch.optim.SGD(low, lr=1e-3), "bf16+8")
    steps = 20
    run(whole, plain, steps)
    run(optimizer, low, steps)
    for ours, theirs in zip(low, plain, strict=True):
        # SGD adds up rounding errors: one of 2**-16 a step and at the start, float32's own besides
        bound = (steps + 1) * (2.0**-16 + 2.0**-23) * (theirs.abs() + 0.02)
        assert ((optimizer.master(ours) - theirs).abs() <= bound).all()


def test_stochastic_rounding_moves_by_the_mean_and_repeats():
    def trained(seed):
        weight = nn.Parameter(torch.ones(2**14))
        optimizer = SplitWeights(torch.optim.SGD([weight], lr=2.0**-12), "bf16+sr", seed=seed)
        for _ in range(8):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach()

    weight = trained(0)
    moved = (1 - weight.double()).mean().item()
    # Each step rounds to neighbours at most 2**-8 below: variance at most (2**-8 / 2)**2 a step.
    deviation = (8 * 2.0**-18 / 2**14) ** 0.5
    assert abs(moved - 8 * 2.0**-12) < 5 * deviation
    assert torch.equal(trained(0), weight)
    assert not torch.equal(trained(1), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_its_bytes_and_trains(name):
    start, target = torch.randn(2, 1000)
    losses = []
    plain, weight = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = SplitWeights(torch.optim.Adam([weight], lr=3e-2), name)
    for param, own in ((plain, torch.optim.Adam([plain], lr=3e-2)), (weight, optimizer)):
        for _ in range(100):
            param.grad = (param.detach().float() - target).to(param.dtype)
            own.step()
        losses.append((param.detach().float() - target).square().mean().item())
    before = (start - target).square().mean().item()
    assert before - losses[1] > 0.99 * (before - losses[0])
    held = weight.nbytes + sum(t.nbytes for t in optimizer.corrections.values() if t is not None)
    assert held == FORMATS[name].nbytes * 1000
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


def test_a_weight_written_by_others_drops_its_correction():
    weight = nn.Parameter(torch.full((4,), 1.001))
    optimizer = SplitWeights(torch.optim.SGD([weight], lr=1.0), "bf16+16")
    assert optimizer.master(weight)[0].item() == torch.tensor(1.001).item()
    with torch.no_grad():
        weight[0] = 2.0
    assert optimizer.master(weight).tolist() == [2.0, 1.0, 1.0, 1.0]
    optimizer.set_master(weight, torch.full((4,), 0.1))
    assert optimizer.master(weight)[0].item() == torch.tensor(0.1).item()


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adamw4bit"])
def test_checkpoints_resume_bit_for_bit_in_either_order(name, model_first):
    low, again = params(), params(1)
    optimizer = SplitWeights(OPTIMIZERS[name](low), "bf16+8")
    resumed = SplitWeights(OPTIMIZERS[name](again), "bf16+8")
    run(optimizer, low, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    assert "memtrain" not in saved["state"]
    if not model_first:
        resumed.load_state_dict(saved)
    with torch.no_grad():
        for ours, theirs in zip(again, low, strict=True):
            ours.copy_(theirs)
    if model_first:
        resumed.load_state_dict(saved)
    run(optimizer, low, 2, first=3)
    run(resumed, again, 2, first=3)
    for ours, theirs in zip(again, low, strict=True):
        assert torch.equal(resumed.master(ours), optimizer.master(theirs))


def test_wrong_checkpoints_change_nothing():
    low = params()
    optimizer = SplitWeights(torch.optim.AdamW(low), "bf16+8")
    run(optimizer, low, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(saved)
    other["param_groups"][0]["memtrain"][0][1]["format"] = "bf16+16"
    short = copy.deepcopy(saved)
    short["state"][0]["weight_correction"] = torch.zeros(3, dtype=torch.int8)
    lost = copy.deepcopy(saved)
    del lost["state"][0]["weight_correction"]
    newer = copy.deepcopy(saved)
    newer["memtrain"]["format"] = 2
    for wrong, message in [
        (other, r"weights='bf16\+16', not 'bf16\+8'"),
        (short, r"a correction \(3,\) of a weight of shape"),
        (lost, "no correction of a weight of shape"),
        (newer, "format 2; allowed: 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])
    optimizer.load_state_dict(torch.optim.AdamW(params()).state_dict())  # a plain one's
    assert optimizer.state == {}
    assert torch.equal(optimizer.master(low[0]), low[0].float())


def test_groups_copies_and_hooks():
    low = params()
    optimizer = SplitWeights(torch.optim.SGD(low, lr=0.5), "bf16+16")
    optimizer.add_param_group({"params": [nn.Parameter(torch.full((2,), 1.001))], "lr": 0.25})
    added = optimizer.param_groups[1]["params"][0]
    assert added.dtype == BF16
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    added.grad = torch.ones(2, dtype=BF16)
    optimizer.step()
    assert seen == ["pre"]
    assert optimizer.master(added)[0].item() == (torch.tensor(1.001) - 0.25).item()
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin = made.param_groups[1]["params"][0]
        assert twin is not added
        assert torch.equal(made.master(twin), optimizer.master(added))
        twin.grad = torch.ones(2, dtype=BF16)
        made.step()
        assert made.master(twin)[0].item() == (torch.tensor(1.001) - 0.5).item()


def test_frozen_kept_and_other_dtypes():
    norm = nn.BatchNorm1d(3)
    frozen, double = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).double())
    keep = keeps_float32(norm)
    assert set(keep) == {norm.weight, norm.bias}
    inner = torch.optim.SGD([norm.weight, double], lr=0.5)
    optimizer = SplitWeights(inner, "bf16+8", keep=keep, frozen=[frozen])
    assert (norm.weight.dtype, double.dtype, frozen.dtype) == (torch.float32, torch.float64, BF16)
    norm.weight.grad, double.grad = torch.ones(3), torch.ones(3).double()
    optimizer.step()
    assert norm.weight.tolist() == double.tolist() == [0.5, 0.5, 0.5]
    optimizer.restore()
    assert frozen.dtype == torch.float32


def test_strides_are_kept():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    before = weight.detach().clone()
    optimizer = SplitWeights(torch.optim.SGD([weight], lr=0.0), "bf16+16")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(optimizer.master(weight), before)


def test_unknown_formats_and_sparse_gradients_are_refused():
    with pytest.raises(ValueError, match=r"weights='bf16\+4' is unknown; allowed: bf16, bf16\+sr"):
        SplitWeights(torch.optim.SGD(params(), lr=1.0), "bf16+4")
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = SplitWeights(torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([1])).sum().backward()
    before = optimizer.master(table.weight)
    with pytest.raises(RuntimeError, match="dense gradients only"):
        optimizer.step()
    assert torch.equal(before, optimizer.master(table.weight))


@pytest.mark.parametrize(("name", "warns"), [("bf16", True), ("bf16+8", False), ("bf16+sr", False)])
def test_only_weights_without_a_master_stall(name, warns, recwarn):
    weight = nn.Parameter(torch.full((80, 80), 100.0))
    optimizer = SplitWeights(AdamW4bit([weight], lr=1e-3, weight_decay=0.0), name)
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert sum("stalled" in str(w.message) for w in recwarn) == warns


@pytest.mark.parametrize("name", ["adamw", "adamw4bit"])
@pytest.mark.parametrize("weights", ["bf16+sr", "bf16+8"])
def test_a_converted_weight_is_refused_and_given_back(name, weights):
    given = params()
    optimizer = SplitWeights(OPTIMIZERS[name](given), weights)
    run(optimizer, given, 2)
    for param in given[1:]:
        param.data = param.data.half()  # as model.half() does
    before = [param.detach().clone() for param in given]
    with pytest.raises(TypeError, match=r"now torch.float16, .* after unwrap"):
        run(optimizer, given, 1)
    assert all(torch.equal(now, was) for now, was in zip(given, before, strict=True))
    inner = optimizer.restore()
    assert all(torch.equal(p, was.float()) for p, was in zip(given[1:], before[1:], strict=True))
    run(inner, given, 1)


class Elsewhere(torch.Tensor):
    """Stands for a tensor of another device."""

    device = torch.device("meta")

    def to(self, device):
        assert device == torch.device("cpu")
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("name", ["adamw", "adamw4bit"])
def test_corrections_follow_a_model_that_is_moved_once_wrapped(name):
    """As accelerate's `prepare` moves it."""
    given = params()
    optimizer = SplitWeights(OPTIMIZERS[name](given), "bf16+8")
    twin = copy.deepcopy(optimizer)
    others = twin.param_groups[0]["params"]

    def move():
        for param, correction in optimizer.corrections.items():
            optimizer.corrections[param] = correction.as_subclass(Elsewhere)

    move()
    run(optimizer, given, 2)
    run(twin, others, 2)
    move()
    optimizer.load_state_dict(twin.state_dict())
    assert all(type(correction) is torch.Tensor for correction in optimizer.corrections.values())
    assert all(map(torch.equal, given, others))
    assert all(map(torch.equal, optimizer.corrections.values(), twin.corrections.values()))

"""`wrap` is of a model and its optimizers: a second call, several optimizers, models, or none."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import memtrain
from memtrain.optim import CompressedStates, compress
from memtrain.optim.states.optimizer_hooks import innermost

PRESETS = ("balanced", "all_four", "exact", "optimizer_only", "activations_only")


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def adamw(*models):
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-3)


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def train(forward, optimizers, steps=3):
    losses = []
    for k in range(steps):
        torch.manual_seed(k)
        loss = forward(torch.randn(32, 64)).float().square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_bytes(optimizer):
    inner = innermost(optimizer)
    parts = [v for s in inner.state.values() for v in s.values()]
    tensors = [t for v in parts for t in (v.values() if isinstance(v, dict) else [v])]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim())


@pytest.mark.each_value
@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_second_optimizer_is_wrapped_as_the_first_was(preset, collected):
    """As a second `fit` does: the same run as if the model had never been wrapped before."""
    first, fresh = make(), make()
    _, optimizer = memtrain.wrap(first, adamw(first), preset)
    optimizer.zero_grad()
    if collected:
        del optimizer
        gc.collect()
    expected = memtrain.wrap(fresh, adamw(fresh), preset)[1]
    _, second = memtrain.wrap(first, adamw(first), preset)
    assert type(second) is type(expected)
    assert train(first, [second]) == train(fresh, [expected])
    assert state_bytes(second) == state_bytes(expected)
    assert (state_bytes(second) < 2 * 8192 * 4) is (preset not in ("exact", "activations_only"))
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in first.modules())
    assert hooks == sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in fresh.modules())


def test_the_first_optimizer_is_let_go_with_the_weights_that_it_made():
    model, twin = make(), make()
    _, old = memtrain.wrap(model, adamw(model), "all_four")
    train(model, [old])
    masters = memtrain.fp32_state_dict(model)
    _, new = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "exact")
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, masters[name])
    with pytest.raises(RuntimeError, match=r"memtrain.wrap\(model, \[first, second\]\)"):
        old.step()
    twin.load_state_dict(masters)
    assert train(model, [new]) == train(twin, [torch.optim.SGD(twin.parameters(), lr=0.1)])


@pytest.mark.parametrize("preset", ["exact", "balanced"])
def test_an_original_that_is_wrapped_again_keeps_its_states(preset):
    model, plain = make(), make()
    original, reference = adamw(model), adamw(plain)
    _, first = memtrain.wrap(model, original, preset)
    train(model, [first])
    _, again = memtrain.wrap(model, original, preset)
    train(plain, [reference])
    expected = train(plain, [reference])
    expected = expected if preset == "exact" else pytest.approx(expected, rel=0.05)
    assert train(model, [again]) == expected
    assert again.state[model[0].weight]["step"] == 6
    del first, again
    gc.collect()
    with pytest.raises(ValueError, match=r"was deleted.*; allowed: .* a new optimizer"):
        memtrain.wrap(model, original, preset)


def test_a_refused_second_wrap_leaves_the_first_as_it_was():
    model = make()
    _, optimizer = memtrain.wrap(model, adamw(model), "all_four")
    before = memtrain.plan_of(model)
    for optimizers, cfg, message in (
        (adamw(model), "smalest", "smalest"),
        (adamw(make()), "exact", "not the model's"),
        (optimizer, "exact", "already with this optimizer; allowed: unwrap"),
        (None, "all_four", "weights=keep, gradients=keep"),
    ):
        with pytest.raises(ValueError, match=message):
            memtrain.wrap(model, optimizers, cfg)
    assert memtrain.plan_of(model) is before
    train(model, [optimizer])


def test_a_part_that_is_wrapped_is_named():
    model = make()
    memtrain.wrap(model, adamw(model))
    with pytest.raises(ValueError, match="0 is wrapped already; allowed: unwrap it first"):
        memtrain.wrap(nn.Sequential(model), adamw(model))


def test_a_copy_of_a_model_alone_cannot_give_its_lower_bits():
    model = make()
    pair = memtrain.wrap(model, adamw(model), "all_four")
    alone = copy.deepcopy(model)
    with pytest.raises(ValueError, match="loads fp32_state_dict"):
        memtrain.wrap(alone, adamw(alone))
    for both in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        memtrain.wrap(both[0], adamw(both[0]))
        assert {p.dtype for p in both[0].parameters()} == {torch.float32}


@pytest.mark.parametrize("preset", PRESETS)
def test_several_optimizers_are_returned_in_their_order(preset):
    model, plain = make(), make()
    given, reference = muon_and_adamw(model), muon_and_adamw(plain)
    _, both = memtrain.wrap(model, given, preset)
    assert isinstance(both, list)
    losses, expected = train(model, both), train(plain, reference)
    if preset == "exact":
        assert losses == expected
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
    assert losses[-1] < losses[0] - 0.9 * (expected[0] - expected[-1])
    sites = {e.site for e in memtrain.plan_of(model).entries("state")}
    assert {"0.weight / muon / momentum_buffer", "0.bias / adamw / exp_avg"} <= sites
    if preset in ("balanced", "all_four"):
        assert state_bytes(both[0]) < 2 * 8192 * 4 / 7
    if preset == "all_four":
        exact = memtrain.fp32_state_dict(model)["0.weight"]
        assert not torch.equal(exact, model[0].weight.float())
    assert memtrain.unwrap(model, both) == (model, given)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_several_optimizers_resume_bit_for_bit():
    model = make()
    _, both = memtrain.wrap(model, muon_and_adamw(model), "all_four")
    train(model, both)
    saved = copy.deepcopy([model.state_dict(), *(one.state_dict() for one in both)])
    expected = train(model, both)
    other = make(1)
    _, resumed = memtrain.wrap(other, muon_and_adamw(other), "all_four")
    other.load_state_dict(saved[0])
    for one, state in zip(resumed, saved[1:], strict=True):
        one.load_state_dict(state)
    assert train(other, resumed) == expected


def test_a_gans_two_optimizers_train_it_as_without_memtrain():
    def run(preset):
        torch.manual_seed(0)
        net = nn.ModuleDict({"g": make(1), "d": make(2)})
        both = [adamw(net["g"]), adamw(net["d"])]
        if preset:
            _, both = memtrain.wrap(net, both, preset)
        losses = []
        for k in range(4):
            torch.manual_seed(k)
            real, noise = torch.randn(16, 64), torch.randn(16, 64)
            both[1].zero_grad()
            loss = (net["d"](real) - 1).square().mean() + net["d"](
                net["g"](noise).detach()
            ).square().mean()
            loss.backward()
            both[1].step()
            both[0].zero_grad()
            fake = (net["d"](net["g"](noise)) - 1).square().mean()
            fake.backward()
            both[0].step()
            losses += [loss.item(), fake.item()]
        return losses

    plain = run("")
    assert run("exact") == plain
    assert run("balanced") == pytest.approx(plain, rel=0.05)
    with pytest.raises(RuntimeError, match="a GAN's discriminator"):
        run("all_four")  # the generator's backward reaches the discriminator


def test_several_optimizers_that_cannot_be_wrapped_are_refused():
    model = make()
    twice = [adamw(model), torch.optim.SGD(model.parameters())]
    with pytest.raises(ValueError, match="4 parameters are in two optimizers"):
        memtrain.wrap(model, twice)
    with pytest.raises(ValueError, match="one loss scale decides for all"):
        memtrain.wrap(model, muon_and_adamw(model), ["precision=size_ordered"])
    _, both = memtrain.wrap(model, muon_and_adamw(model))
    with pytest.raises(ValueError, match="wrap returned 2 with this model"):
        memtrain.unwrap(model, both[0])
    memtrain.unwrap(model, both)


@pytest.mark.parametrize("preset", PRESETS)
def test_two_models_of_one_optimizer(preset):
    def run(preset):
        encoder, decoder = make(1), make(2)
        optimizer = adamw(encoder, decoder)
        if preset:
            (encoder, decoder), optimizer = memtrain.wrap([encoder, decoder], optimizer, preset)
            gc.collect()  # nobody else refers to the ModuleList
        losses = train(lambda x: decoder(encoder(x)), [optimizer])
        if preset:
            models, original = memtrain.unwrap([encoder, decoder], optimizer)
            assert [*models] == [encoder, decoder]
            assert type(original) is torch.optim.AdamW
            assert not any(m._forward_hooks for m in models.modules())
        return losses

    plain = run("")
    assert run(preset) == (plain if preset == "exact" else pytest.approx(plain, rel=0.05))
    with pytest.raises(ValueError, match="list of 2 models is not wrapped"):
        memtrain.unwrap([make(), make()], adamw(make()))


def test_a_model_without_an_optimizer_saves_its_activations():
    model, plain = make(), make()
    x = torch.randn(32, 64)
    _, nothing = memtrain.wrap(model, None, "activations_only")
    assert nothing is None
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    planned = {e.site: e for e in memtrain.plan_of(model).entries("activation")}
    assert planned["1 / gelu / input"].planned == 32 * 128 * 3 // 8
    # The last layer's own weight gradient is of a compressed input; its bias's is exact.
    assert torch.equal(model[2].bias.grad, plain[2].bias.grad)
    assert memtrain.unwrap(model, None) == (model, None)


def test_what_is_unmet_is_reported_without_an_optimizer_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    memtrain.wrap(model, None, ["preset=activations_only", "activations.exceptions=[{op: gelo}]"])
    with pytest.warns(RuntimeWarning, match="match no saved tensor .*gelo"):
        model(torch.randn(32, 64))
    model(torch.randn(32, 64))


@pytest.mark.parametrize("cfg", [None, "balanced", "all_four", "exact"])
def test_states_of_no_optimizer_are_an_error_that_names_the_config(cfg):
    with pytest.raises(ValueError, match=r"optimizer=None .*cfg='activations_only', or optim=none"):
        memtrain.wrap(make(), None, cfg)


def test_lbfgs_trains_with_compressed_activations():
    model, x = make(), torch.randn(32, 64)
    _, optimizer = memtrain.wrap(
        model, torch.optim.LBFGS(model.parameters(), lr=0.1), "activations_only"
    )

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < 0.9 * first
    other = make()
    with pytest.raises(TypeError, match=r"activations_only, which does not compress states"):
        memtrain.wrap(other, torch.optim.LBFGS(other.parameters()), "balanced")


def test_a_preset_is_not_what_compress_takes():
    model = make()
    with pytest.raises(TypeError, match=r"choose='balanced'.*memtrain.wrap"):
        compress(adamw(model), "balanced")
    assert isinstance(compress(adamw(model)), CompressedStates)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"]
)
@pytest.mark.parametrize("preset", ["balanced", "all_four", "activations_only"])
def test_copies_of_both_train_equally_and_resume(preset, copied):
    def new():
        torch.manual_seed(0)
        replaced = nn.LayerNorm(256), nn.GELU(), NewGELUActivation(), LlamaRMSNorm(256)
        model = nn.Sequential(nn.Linear(64, 256), *replaced, nn.Linear(256, 64))
        return memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), preset)

    def steps(model, optimizer, numbers):
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            model(torch.randn(32, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters()]

    model, optimizer = new()
    steps(model, optimizer, range(3))
    twin, other = copied((model, optimizer))
    resumed, its = new()
    resumed.load_state_dict(twin.state_dict())
    its.load_state_dict(copy.deepcopy(other.state_dict()))
    if preset == "activations_only":  # whose optimizer is torch's: no hooks are copied
        memtrain.load_state_dict(resumed, memtrain.state_dict(twin))
    expected = steps(model, optimizer, range(3, 6))
    for one in ((twin, other), (resumed, its)):
        assert all(map(torch.equal, steps(*one, range(3, 6)), expected))
    plain = memtrain.unwrap(twin, other)[1]
    assert not plain._optimizer_state_dict_post_hooks
    assert not plain._optimizer_load_state_dict_pre_hooks


def test_copies_alone_or_the_optimizer_first_save_what_they_know():
    model = nn.Linear(64, 64)
    pair = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "all_four")
    pair[0](torch.randn(8, 64)).sum().backward()
    its, twin = copy.deepcopy((pair[1], pair[0]))
    alone = copy.deepcopy(pair[1])
    pair[0](torch.randn(8, 64))
    saved = [dict(one.state_dict()["param_groups"][0]["memtrain"]) for one in (pair[1], its, alone)]
    assert [own.get("model") for own in saved] == [{"step": 2}, {"step": 1}, None]
    assert memtrain.state_dict(twin) == {"step": 1}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ddp_refuses_a_copy_with_its_optimizer_alone():
    model = nn.Linear(64, 64)
    pair = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "all_four")
    both, alone, x = copy.deepcopy(pair), copy.deepcopy(model), torch.randn(8, 64)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(alone)(x).sum().backward()
        with pytest.raises(RuntimeError, match="gradients=keep, or FSDP2"):
            nn.parallel.DistributedDataParallel(both[0])(x)
    finally:
        torch.distributed.destroy_process_group()

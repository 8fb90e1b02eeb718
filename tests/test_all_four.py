"""Weights, gradients, states and activations together: the bytes, and the same training."""

import copy

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from memtrain.config.sources import GRADIENTS, WEIGHTS, Config
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.release_checks import CLIPS
from memtrain.optim.wrappers.weights import FORMATS
from memtrain.plan.predicted_bytes import WORKSPACE
from memtrain.training.data import build_source
from memtrain.training.run import Run
from memtrain.training.settings import compose, from_mapping


def tiny_run(name, preset, steps):
    overrides = [
        "experiment=smoke", f"preset={preset}", f"training.steps={steps}", "training.clip=0",
        "training.eval_every=0",
    ]  # fmt: skip
    config = from_mapping(compose(overrides))
    run = Run(name, config, build_source(config.data, config.seed))
    while not run.finished:
        run.train_step()
    return run


def test_all_four_trains_a_tiny_gpt_to_plains_loss():
    steps = 40
    plain, wrapped = tiny_run("plain", "balanced", steps), tiny_run("wrapped", "all_four", steps)
    start = plain.rows[0].loss
    reached = [run.validate().loss for run in (plain, wrapped)]
    assert start - reached[0] > 0.5  # it learns at all
    assert start - reached[1] > 0.9 * (start - reached[0])  # the bar of every preset (test_api)
    # Released, but for the kept gradient: the gradient of a smallest parameter.
    assert wrapped.bytes["gradients"] == min(p.nbytes for p in wrapped.model.parameters())
    assert wrapped.bytes["weights"] == plain.bytes["weights"] / 2
    assert {p.dtype for p in wrapped.model.parameters()} == {torch.bfloat16}
    model, optimizer = memtrain.unwrap(wrapped.model, wrapped.optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    wrapped.model, wrapped.optimizer = model, optimizer
    assert wrapped.validate().loss == pytest.approx(reached[1], rel=1e-2)


def test_memtrain_train_clips_released_gradients_too():
    overrides = ["experiment=smoke", "preset=all_four", "training.clip=0.5"]
    config = from_mapping(compose(overrides))
    optimizer = Run("wrapped", config, build_source(config.data, config.seed)).optimizer
    assert isinstance(optimizer, ReleaseGradients)
    assert (optimizer.clip, optimizer.limit) == ("previous", 0.5)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.BatchNorm1d(128), nn.Linear(128, 10))


def entries(plan, kind):
    return {entry.site: entry for entry in plan.entries(kind)}


def test_the_plan_reports_bytes_of_weights_and_gradients():
    model = make()
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    plan = memtrain.make_plan(model, optimizer, "all_four")
    weights, gradients = entries(plan, "weight"), entries(plan, "gradient")
    row = weights["0.weight"]
    assert (row.nbytes, row.planned, row.compressor) == (4 * 8192, 3 * 8192, "bf16+8")
    assert weights["0.bias"].planned == 2 * 128
    assert "no correction" in weights["0.bias"].reason
    assert weights["2.weight"].planned == 4 * 128
    assert "running statistics" in weights["2.weight"].reason
    assert gradients["0.weight"].planned == 0
    assert "0.bias" not in gradients
    assert gradients[WORKSPACE].planned == 2 * 8192
    model, optimizer = memtrain.wrap(model, optimizer, "all_four")
    split = optimizer.inner
    held = storage_nbytes([*model.parameters(), *split.corrections.values()])
    assert held == sum(row.planned for row in weights.values())
    with pytest.raises(TypeError, match="has compressed states already"):
        memtrain.make_plan(make(), optimizer, {"weights": "bf16"})
    model = make()
    only = memtrain.make_plan(model, torch.optim.AdamW(model.parameters()), {"weights": "bf16"})
    assert entries(only, "gradient")["0.weight"].planned == 2 * 8192


def test_the_audit_counts_the_forward_of_two_byte_weights():
    x = torch.randn(32, 64)
    model = make()
    cfg = {"preset": "activations_only", "activations": {"rules": []}}
    report = memtrain.audit(model, x, {**cfg}, optimizer=torch.optim.SGD(model.parameters()))
    low = memtrain.audit(
        model,
        x,
        {**cfg, "activations": {"rules": [{"compressor": "identity"}]}, "weights": "bf16+8"},
        optimizer=torch.optim.SGD(model.parameters()),
    )
    both = [next(row for row in r.rows if row.name.startswith("1 / gelu")) for r in (report, low)]
    assert (both[0].planned, both[1].planned) == (4 * 32 * 128, 2 * 32 * 128)


def test_masters_are_exported_and_imported():
    model = make()
    whole = copy.deepcopy(model.state_dict())
    cfg = {"preset": "optimizer_only", "weights": "bf16+16"}
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
    exported = memtrain.fp32_state_dict(model)
    assert exported.keys() == whole.keys()
    assert all(torch.equal(exported[name], value) for name, value in whole.items())
    assert not torch.equal(model[0].weight, whole["0.weight"])
    other = make().requires_grad_(True)
    torch.nn.init.normal_(other[0].weight)
    memtrain.load_fp32_state_dict(model, other.state_dict())
    found = memtrain.fp32_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())
    with pytest.raises(ValueError, match=r"keys differ.*0\.bias"):
        memtrain.load_fp32_state_dict(model, {k: v for k, v in whole.items() if k != "0.bias"})
    with pytest.raises(ValueError, match=r"0\.bias has shape \(3,\), not \(128,\)"):
        memtrain.load_fp32_state_dict(model, {**whole, "0.bias": torch.zeros(3)})
    found = memtrain.fp32_state_dict(model)
    assert torch.equal(found["0.weight"], other[0].weight)
    del optimizer
    lonely = copy.deepcopy(model)
    with pytest.raises(ValueError, match="copy of the model"):
        memtrain.fp32_state_dict(lonely)
    plain, kept = memtrain.wrap(other, torch.optim.SGD(other.parameters()), "optimizer_only")
    assert torch.equal(memtrain.fp32_state_dict(plain)["0.weight"], other[0].weight)
    assert kept is not None


def test_the_names_in_configs_are_those_of_the_optimizers():
    assert set(WEIGHTS) - {"keep"} == set(FORMATS)
    assert GRADIENTS == ("keep", "release")
    for clip in CLIPS:
        assert memtrain.Config().release.__class__(clip=clip).clip == clip
    with pytest.raises(ValueError, match=r"release\.clip='norm'"):
        Config().release.__class__(clip="norm")
    with pytest.raises(ValueError, match="sensitivity"):
        memtrain.make_plan(
            make(),
            torch.optim.SGD(make().parameters()),
            {"preset": "gact4", "gradients": "release"},
        )


def test_weights_that_another_optimizer_steps_are_reported_when_they_are_rounded():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters())
    reported = "2.weight and 1 more: require gradients, are in no group .* weights='bf16\\+8' has"
    with pytest.warns(RuntimeWarning, match=reported):
        model, optimizer = memtrain.wrap(model, optimizer, "all_four")
    assert model[2].weight.dtype == torch.bfloat16
    memtrain.unwrap(model, optimizer)
    memtrain.wrap(model, torch.optim.AdamW(model[2:].parameters()), "all_four")


def test_a_second_backward_through_released_weights_says_what_to_do():
    def losses():
        hidden = body(torch.ones(4, 64))
        return heads[0](hidden).sum(), heads[1](hidden).sum()

    body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    heads = nn.ModuleList([nn.Linear(64, 2), nn.Linear(64, 3)])
    model = nn.ModuleList([body, heads])
    _, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "all_four")
    first, second = losses()
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    optimizer.step()
    sum(losses()).backward()
    optimizer.step()
    losses()[0].backward()
    with pytest.raises(RuntimeError, match="a GAN's discriminator"):
        losses()[0].backward()

"""States in host memory: the training in place, bit for bit; order, overlap, checkpoints."""

import copy
import io
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.compressors import Identity
from memtrain.config.sources import load
from memtrain.optim.wrappers import accumulate
from memtrain.optim.wrappers.host_copies import CudaCopies
from memtrain.optim.wrappers.host_parameters import check_whole
from memtrain.optim.wrappers.host_states import HostStates
from tests.compressors import test_host
from tests.equality import differences

ON_HOST = ["optim.device=cpu"]
EXACT = ["optim.device=cpu", "release.clip=global_norm"]
STATES = {
    "rank1_4bit": "bf16+8",
    "factored_4bit": "bf16+sr",
    "factored_2bit": "bf16+sr",
    "factored_8bit": "bf16+16",
    "identity": "bf16+8",
}


class Net(nn.Module):
    """A frozen bias, a norm whose parameters stay float32, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm, self.nothing = nn.BatchNorm1d(128), nn.Parameter(torch.empty(0, 64))
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        x = nn.functional.gelu(self.first(x))
        x = self.last(self.norm(x.float()).to(x.dtype))
        return torch.cat([x, self.nothing])


def make():
    torch.manual_seed(0)
    return Net()


def batch(step):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


def loss_of(model, x):
    return model(x).float().square().mean()


@cache
def config(*cfg):
    if "optim.device=cpu" not in cfg:
        return load(cfg)
    own = config(*[one for one in cfg if one not in EXACT])  # composing takes long
    release = replace(own.release, clip="global_norm") if EXACT[1] in cfg else own.release
    return replace(own, optim=replace(own.optim, device="cpu"), release=release)


def wrapped(cfg):
    model = make()
    return memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config(*cfg))


def train(model, optimizer, steps=range(3), passes=1, between=lambda: None):
    for step in steps:
        for k in range(passes):
            loss_of(model, batch(10 * step + k)).backward()
        between()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one, other):
    """Weights, states, counters, options: all that a checkpoint has."""
    for ours, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert differences(one[1].state_dict(), other[1].state_dict()) == []


def released(*more):
    return ["preset=all_four", "activations=none", "optim.min_elements=0", *more]


KEPT = ["preset=optimizer_only", "optim.min_elements=0"]
ALL = ["preset=all_four", "optim.min_elements=0"]
PLACES = {
    **{name: [*ALL, f"optim={name}", f"weights={weights}"] for name, weights in STATES.items()},
    "kept": KEPT,
    "kept, split": [*KEPT, "weights=bf16+16"],
    "released, whole": [*KEPT, "gradients=release"],
    "each clipped": released("release.clip=parameter", "release.limit=0.01"),
    "by the last norm": released("release.clip=previous", "release.limit=0.01"),
    "by value": released("release.clip=value", "release.limit=0.001"),
    "added up": released("release.accumulate=3"),
    "added up, clipped": released("release.accumulate=3", "release.clip=parameter"),
    "8 bits": released("optim=none", "+optim.rules=[{compressor: B256/DE-08}]"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_step_on_the_host_is_the_step_in_place(name):
    here, there = wrapped(PLACES[name]), wrapped([*PLACES[name], *ON_HOST])
    passes = 3 if "release.accumulate=3" in PLACES[name] else 1
    train(*here, passes=passes)
    train(*there, passes=passes)
    assert isinstance(there[1], HostStates)
    assert_same(there, here)


def closure_of(model, step):
    def closure():
        loss = loss_of(model, batch(10 * step))
        loss.backward()
        return loss

    return closure


@pytest.mark.filterwarnings("ignore:.*was skipped:RuntimeWarning")
def test_clipping_by_the_global_norm_is_exact():
    """As `two_pass`, which runs the backward twice: the same norms, factors and steps."""
    own = ["release.limit=0.01"]
    twice = wrapped(released(*own, "release.clip=two_pass"))
    model, optimizer = wrapped(released(*own, *EXACT))
    for step in range(3):
        loss_of(model, batch(10 * step)).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        twice[1].step(closure_of(twice[0], step))
        assert optimizer.norm == twice[1].norm > 0.01
    assert all(map(torch.equal, model.parameters(), twice[0].parameters()))
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()["state"]])
    (loss_of(model, batch(0)) * float("inf")).backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert differences([list(model.parameters()), optimizer.state_dict()["state"]], before) == []


THROWN = {
    "half a sum": ["release.accumulate=2"],
    "waiting": ["release.limit=0.01", *EXACT],
}


@pytest.mark.parametrize("name", THROWN)
def test_what_zero_grad_throws_away_is_in_no_step(name):
    def trained(*, thrown):
        model, optimizer = wrapped(released(*THROWN[name], *ON_HOST))
        for step in range(2):
            if thrown:
                (100 * loss_of(model, batch(step))).backward()
                optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5  # a step has the options of its first backward
            passes = 2 if "accumulate" in THROWN[name][0] else 1
            train(model, optimizer, range(step, step + 1), passes)
        return model, optimizer

    (_, optimizer), (_, other) = both = trained(thrown=True), trained(thrown=False)
    assert optimizer.norm == other.norm
    assert_same(*both)


def test_sums_of_gradients_are_clipped_by_their_global_norm(monkeypatch):
    """As torch clips gradients that were added up by autograd, which float32 does in one order."""
    monkeypatch.setattr(accumulate, "BUFFER", Identity())  # as exact as autograd's own sums
    limit, passes = 0.01, 3
    own = ["preset=optimizer_only", "optim=identity", "gradients=release"]
    own += [f"release.limit={limit}", f"release.accumulate={passes}", *EXACT]
    ours, plain = wrapped(own), make()
    optimizer, norms = torch.optim.AdamW(plain.parameters(), lr=1e-2), []

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit).item())

    train(plain, optimizer, passes=passes, between=clip)
    train(*ours, passes=passes)
    assert ours[1].norm == pytest.approx(norms[-1], rel=1e-4)
    for one, other in zip(ours[0].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cfg", [released(), KEPT], ids=["released", "kept"])
def test_a_checkpoint_of_one_place_resumes_in_the_other(cfg):
    def saved(model, optimizer):
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def resumed(given, cfg):
        model, optimizer = wrapped(cfg)
        train(model, optimizer, range(1))
        model.load_state_dict(given[0])
        optimizer.load_state_dict(given[1])
        return model, optimizer

    here, there = wrapped(cfg), wrapped([*cfg, *ON_HOST])
    train(*here, range(3))
    train(*there, range(3))
    files = saved(*here), saved(*there)
    assert differences(*files) == []
    train(*here, range(3, 5))
    for own in (cfg, [*cfg, *ON_HOST]):
        again = resumed(files[0], own)
        train(*again, range(3, 5))
        assert_same(again, here)


def test_copies_of_an_optimizer_go_on_by_themselves():
    here, there = wrapped(released()), wrapped(released(*ON_HOST))
    for each in (here, there):
        train(*each, range(2))
    again = copy.deepcopy(there)
    for each in (here, there, again):
        train(*each, range(2, 4))
    assert_same(there, here)
    assert all(map(torch.equal, again[0].parameters(), here[0].parameters()))


def test_groups_and_schedules_are_those_of_the_device():
    def trained(cfg):
        model = make()
        params = list(model.parameters())
        more = {"params": params[2:], "lr": 3e-3, "weight_decay": 0.1}
        plain = torch.optim.AdamW([{"params": params[:2]}, more], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        model, optimizer = memtrain.wrap(model, plain, config(*cfg))
        train(model, optimizer, range(2))
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.3
        train(model, optimizer, range(2, 4))
        assert optimizer.param_groups[0]["lr"] == 5e-3
        assert [p for g in optimizer.param_groups for p in g["params"]] == params
        train(model, optimizer, range(4, 5))
        return model, optimizer

    for cfg in (released(), KEPT, ["preset=exact", "gradients=release"]):
        assert_same(trained([*cfg, *ON_HOST]), trained(cfg))


def test_weights_that_something_else_writes_are_fetched():
    def written(cfg):
        model, optimizer = wrapped(cfg)
        train(model, optimizer, range(2))
        with torch.no_grad():
            model.last.weight.mul_(0.5)
        train(model, optimizer, range(2, 3))
        memtrain.load_fp32_state_dict(model, make().state_dict())
        masters = memtrain.fp32_state_dict(model)
        train(model, optimizer, range(3, 5))
        return (model, optimizer), masters

    cfg = released("weights=bf16+16")
    here, there = written(cfg), written([*cfg, *ON_HOST])
    assert_same(there[0], here[0])
    assert differences(there[1], here[1]) == []
    assert torch.equal(there[1]["last.weight"], make().last.weight)


@pytest.mark.parametrize("cfg", [released(), KEPT, ["preset=exact"]], ids=str)
def test_unwrapping_moves_all_back(cfg):
    here, there = wrapped(cfg), wrapped([*cfg, *ON_HOST])
    for each in (here, there):
        train(*each, range(2))
    here, there = (memtrain.unwrap(*each) for each in (here, there))
    assert type(there[1]) is torch.optim.AdamW
    assert [p for g in there[1].param_groups for p in g["params"]] == [*there[0].parameters()]
    for each in (here, there):
        train(*each, range(2, 3))
    assert_same(there, here)


@pytest.mark.parametrize("cfg", [KEPT, [*KEPT, "weights=bf16+16"]], ids=str)
def test_a_step_that_raised_leaves_nothing_to_the_next(cfg):
    """As in place: fixed options apply, and gradients that were thrown away step nothing."""

    def stumbled(cfg):
        model, optimizer = wrapped(cfg)
        (group,) = optimizer.param_groups
        train(model, optimizer, range(1))
        group["lr"] = -1.0
        with pytest.raises(ValueError, match=r"learning rate: -1\.0"):
            train(model, optimizer, range(1))
        group["lr"] = 3e-3
        optimizer.zero_grad()
        model.last(torch.ones(4, 128, dtype=model.last.weight.dtype)).sum().backward()
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        group["lr"] = 2e-3
        optimizer.zero_grad()
        optimizer.step(closure_of(model, 1))
        return model, optimizer

    assert_same(stumbled([*cfg, *ON_HOST]), stumbled(cfg))


def test_what_the_host_cannot_take_is_refused_by_name():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for cfg, why in (
        (["optim.device=cuda"], "optim.device='cuda' is unknown; .*allowed: cpu, keep"),
        (["optim=none", *ON_HOST], "optim.device='cpu' without rules .* allowed: .*optim=identity"),
        (["release.clip=global_norm"], "'global_norm' .* allowed with optim.device=cpu"),
    ):
        with pytest.raises(ValueError, match=why):
            memtrain.wrap(model, optimizer, cfg)
    assert type(optimizer.step(lambda: loss_of(model, batch(0)))) is torch.Tensor  # not taken over


def test_sharded_parameters_are_refused():
    part = nn.Parameter(torch.ones(4))
    part._local_tensor = torch.ones(2)  # as a DTensor has it
    with pytest.raises(ValueError, match=r"sharded parameter .*allowed for it: optim.device=keep"):
        check_whole([part])


@pytest.mark.parametrize("cfg", [released(), KEPT], ids=str)
def test_a_group_after_wrap_is_refused(cfg):
    _, optimizer = wrapped([*cfg, *ON_HOST])
    with pytest.raises(RuntimeError, match=r"add the group before memtrain\.wrap"):
        optimizer.add_param_group({"params": nn.Parameter(torch.ones(4))})
    assert len(optimizer.param_groups) == 1


def test_a_grad_scaler_skips_steps_of_kept_gradients():
    def scaled(cfg):
        model, optimizer = wrapped(cfg)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(3):
            loss = loss_of(model, batch(step)) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 8.0
        return model, optimizer

    assert_same(scaled([*KEPT, *ON_HOST]), scaled(KEPT))


def layers():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    numel = sum(p.numel() for p in model.parameters())
    return model, torch.optim.AdamW(model.parameters()), torch.ones(8, 256), numel


def test_predictions_for_a_device_leave_host_memory_out():
    *step, numel = layers()
    both = config(*released()), config(*released(*ON_HOST))
    here, there = (predict(*step, cfg, StepOptions(device="cuda")).peak for cfg in both)
    plans = [memtrain.make_plan(*step[:2], cfg) for cfg in both]
    held, none = (sum(row.planned for row in plan.entries("state")) for plan in plans)
    assert (none, sum(row.host for row in plans[1].entries("state"))) == (0, held)
    assert sum(row.host for row in plans[1].entries("weight")) == 3 * numel  # bf16+8
    assert sum(row.planned for row in plans[1].entries("weight")) == 2 * numel
    assert "optimizer states" not in there.parts
    assert there.parts["weights"] == 2 * numel
    assert held + numel - 2 * 2 * 256 * 256 <= here.nbytes - there.nbytes <= held + numel
    kept = memtrain.make_plan(*step[:2], config(*KEPT, *ON_HOST))
    assert {row.site: row.host for row in kept.entries("gradient")}["0.weight"] == 4 * 256 * 256


@pytest.mark.parametrize("how", [KEPT, released()], ids=["kept", "released"])
def test_a_converted_model_is_refused(how):
    model, optimizer, x, _ = layers()
    model, optimizer = memtrain.wrap(model, optimizer, config(*how, *ON_HOST))
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.half()
    before = [param.clone() for param in model.parameters()]

    def step():
        model(x.half()).sum().backward()
        optimizer.step()

    with pytest.raises(TypeError, match=r"is now torch.float16, but its copy .* is torch"):
        step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.nightly
def test_a_step_where_host_and_device_are_one_memory_is_predicted():
    model, optimizer, batch, numel = layers()
    cfg = config(*released(*ON_HOST))
    report = memtrain.audit(model, batch, cfg, optimizer=optimizer, peak=True, measure=True)
    predicted, measured = report.planned_timeline.peak, report.planned_measured.peak
    assert predicted.parts["weights"] == measured.parts["weights"] == 5 * numel
    assert predicted.nbytes == pytest.approx(measured.nbytes, rel=0.03)
    assert report.host["weights"] == 3 * numel


@pytest.mark.parametrize("slow", [0.3, 3.0])
def test_gradients_of_two_streams_stay_until_their_own_has_waited_for_their_copy(monkeypatch, slow):
    bus, side = test_host.Bus(monkeypatch, slow), test_host.Stream()
    copies = CudaCopies(torch.device("cpu"))
    for stream in (bus.main, side, bus.main, side, side, bus.main):
        with bus.entered(stream):
            copies.to_host(bus.born())
    copies.join()
    assert bus.held == 0
    assert bus.peak <= 3

"""wrap and unwrap: the same training, fewer bytes, and everything back."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import memtrain
from memtrain.audit.live_storages import LiveStorages
from memtrain.config.sources import options


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128), nn.ReLU(),
        nn.Dropout(0.1), nn.Linear(128, 10),
    )  # fmt: skip
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=generator)
    return x, (x[:, :10] * 2 + x[:, 10:20]).argmax(1)


def train(model, optimizer, steps):
    x, y = data()
    losses = []
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exact_is_bit_identical_to_plain(name):
    plain, wrapped = make(), make()
    plain_optimizer = OPTIMIZERS[name](plain.parameters())
    model, optimizer = memtrain.wrap(wrapped, OPTIMIZERS[name](wrapped.parameters()), "exact")
    assert train(plain, plain_optimizer, 8) == train(model, optimizer, 8)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])


CORE = ("balanced", "smallest", "exact", "optimizer_only", "activations_only", "all_four")


@pytest.mark.filterwarnings("ignore:no state of RMSprop is compressed")
# One batch again and again: the bits are all that varies, and automatic ones say so.
@pytest.mark.filterwarnings("ignore:quantisation noise of the saved activations:UserWarning")
@pytest.mark.parametrize(
    ("preset", "name"),
    [("balanced", name) for name in OPTIMIZERS]
    # `checkpointed` wants repeated layers: see tests/activations/intercept/test_recompute.py.
    + [
        (preset, "adamw")
        for preset in options("preset")
        if preset not in ("balanced", "checkpointed")
    ]
    + [
        pytest.param(preset, name, marks=pytest.mark.nightly)
        for preset in CORE[1:]
        for name in OPTIMIZERS
        if name != "adamw"
    ],
)
def test_every_preset_trains_every_optimizer(preset, name):
    plain, wrapped = make(), make()
    reference = train(plain, OPTIMIZERS[name](plain.parameters()), 20)
    model, optimizer = memtrain.wrap(wrapped, OPTIMIZERS[name](wrapped.parameters()), preset)
    losses = train(model, optimizer, 20)
    # plain PyTorch's own progress is the yardstick: at least 90% of it
    assert reference[0] - losses[-1] > 0.9 * (reference[0] - reference[-1])


def test_the_model_is_the_same_object_with_the_same_keys():
    model = make()
    keys = list(model.state_dict())
    wrapped, _ = memtrain.wrap(model, torch.optim.AdamW(model.parameters()))
    assert wrapped is model
    assert type(wrapped) is nn.Sequential
    assert list(wrapped.state_dict()) == keys


def test_the_plan_is_completed_at_the_first_forward_and_lists_everything():
    model = make()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "balanced")
    plan = memtrain.plan_of(model)
    assert plan.entries("activation") == []
    train(model, optimizer, 1)
    first = plan.entries("activation")
    train(model, optimizer, 1)
    assert plan.entries("activation") is not first
    assert plan.entries("activation") == first
    by_site = {entry.site: entry for entry in plan.entries()}
    assert by_site["1 / gelu / input"].planned == 64 * 256 * 3 // 8
    assert by_site["0 / linear / input"].reason == "the model's own input: stays alive anyway"
    assert {e.reason for e in plan.entries("weight")} == {"not requested"}
    assert {e.reason for e in plan.entries("gradient")} == {"not requested"}
    state = {e.site: e for e in plan.entries("state")}
    assert state["0.weight / adamw / exp_avg"].compressor.startswith("Block")
    assert "4,096" in state["0.bias / adamw / exp_avg"].reason


def test_a_batch_completes_the_plan_at_once_without_running_the_model():
    model = make()
    before = torch.get_rng_state()
    model, _ = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), batch=data()[0])
    assert torch.equal(before, torch.get_rng_state())
    plan = memtrain.plan_of(model)
    completed = plan.entries("activation")
    assert completed
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert plan.entries("activation") == completed


def test_exceptions_of_the_user_win_and_must_exist():
    model = make()
    cfg = {"activations": {"exceptions": [{"module": "1", "compressor": "identity"}]}}
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
    train(model, optimizer, 1)
    site = {e.site: e for e in memtrain.plan_of(model).entries("activation")}["1 / gelu / input"]
    assert site.planned == site.nbytes == 64 * 256 * 4
    for wrong in (
        {"activations": {"exceptions": [{"module": "h.7"}]}},
        {"optim": {"exceptions": [{"parameter": "0.wait"}]}},
    ):
        other = make()
        with pytest.raises(ValueError, match="matches no"):
            memtrain.wrap(other, torch.optim.AdamW(other.parameters()), wrong)


@pytest.mark.parametrize("name", ["clip=value", "loss_scale=8", "accumulate=2", "limit=0.5"])
def test_options_of_released_gradients_are_refused_where_gradients_are_kept(name):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"release.* has no effect with gradients='keep'"):
        memtrain.wrap(model, optimizer, ["preset=balanced", f"release.{name}"])
    memtrain.wrap(model, optimizer, ["preset=all_four", f"release.{name}"])  # nothing was changed


def test_counters_restore_the_random_stream():
    def fresh():
        model = make()
        return memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "smallest")

    model, optimizer = fresh()
    straight = train(model, optimizer, 3)
    model, optimizer = fresh()
    assert train(model, optimizer, 3) == straight
    state = memtrain.state_dict(model)
    assert state == {"step": 3}
    memtrain.load_state_dict(model, state)
    with pytest.raises(ValueError, match="key 'step'"):
        memtrain.load_state_dict(model, {"stepp": 1})


class TestBadInput:
    def test_no_parameters(self):
        other = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="no parameters"):
            memtrain.wrap(nn.ReLU(), torch.optim.AdamW(other.parameters()))

    def test_unwrapping_what_is_not_wrapped(self):
        model = make()
        with pytest.raises(ValueError, match="not wrapped"):
            memtrain.unwrap(model, torch.optim.AdamW(model.parameters()))

    @pytest.mark.parametrize("swap", [True, False])
    def test_wrong_types(self, swap):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(TypeError, match=r"^(model|optimizer) is of type .*; allowed: "):
            memtrain.wrap(optimizer, model) if swap else memtrain.wrap(model, model)

    def test_a_refused_wrap_changes_nothing(self):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="smalest"):
            memtrain.wrap(model, optimizer, "smalest")
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        memtrain.wrap(model, optimizer)


class Rotary(nn.Module):
    """Fills a cache in its first forward, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.cos, self.calls, self.seen = nn.Linear(64, 64), None, 0, []

    def forward(self, x):
        if self.cos is None:
            self.cos = torch.arange(64).float().cos()
        self.calls += 1
        self.seen.append(self.cos)
        return self.layer(x) * self.cos


def test_a_batch_leaves_no_trace_on_the_model():
    model = Rotary()
    model, _ = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), batch=torch.ones(64, 64))
    assert (model.cos, model.calls, model.seen) == (None, 0, [])
    assert type(model(torch.ones(64, 64))) is torch.Tensor


def test_planning_a_wrapped_model_leaves_it_alone():
    model = make()
    model, _ = memtrain.wrap(model, torch.optim.AdamW(model.parameters()))
    plain = torch.optim.AdamW(model.parameters())
    plan = memtrain.make_plan(model, plain, "smallest", batch=data()[0])
    assert plan.entries("activation")
    assert memtrain.plan_of(model).entries("activation") == []
    assert memtrain.state_dict(model) == {"step": 0}


def test_unwrap_refuses_the_old_optimizer_before_it_changes_anything():
    model = make()
    original = torch.optim.AdamW(model.parameters())
    model, optimizer = memtrain.wrap(model, original)
    with pytest.raises(ValueError, match="the optimizer that wrap returned, not this AdamW"):
        memtrain.unwrap(model, original)
    with pytest.raises(RuntimeError, match="step, save and load the optimizer that"):
        original.step()
    assert memtrain.unwrap(model, optimizer)[1] is original
    train(model, original, 1)


def test_a_tied_parameter_answers_to_each_of_its_names():
    model = nn.ModuleDict({"a": nn.Linear(96, 96), "b": nn.Linear(96, 96)})
    model["b"].weight = model["a"].weight
    cfg = {"optim": {"exceptions": [{"parameter": "b.weight", "compressor": "keep"}]}}
    plan = memtrain.make_plan(model, torch.optim.AdamW(model.parameters()), cfg)
    entries = {entry.site: entry for entry in plan.entries("state")}
    assert entries["a.weight / adamw / exp_avg"].reason == "its rule says keep"


def test_rules_that_match_nothing_are_listed():
    model = make()
    cfg = {"activations": {"exceptions": [{"op": "gelo"}]}}
    plan = memtrain.make_plan(model, torch.optim.AdamW(model.parameters()), cfg, batch=data()[0])
    assert plan.idle_exceptions() == ["activations.exceptions.0: op=gelo"]
    assert "gelo" in plan.listing()


class Prepared(torch.optim.Optimizer):
    """As accelerate's: an optimizer in name, which has no groups or hooks of its own."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler = optimizer, scaler

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_the_optimizer_inside_a_prepared_one_is_taken_and_given_back():
    plain, wrapped = make(), make()
    losses = train(*memtrain.wrap(plain, torch.optim.AdamW(plain.parameters(), lr=2e-3)), 3)
    original = torch.optim.AdamW(wrapped.parameters(), lr=2e-3)
    prepared = Prepared(original)
    model, optimizer = memtrain.wrap(wrapped, prepared)
    assert optimizer is prepared
    assert type(prepared.optimizer).__name__ == "AdamW4bit"
    assert train(model, optimizer, 3) == losses
    assert memtrain.unwrap(model, optimizer) == (wrapped, prepared)
    assert prepared.optimizer is original


def test_a_prepared_optimizer_with_a_scaler_is_refused():
    model = make()
    prepared = Prepared(torch.optim.AdamW(model.parameters()), scaler=object())
    with pytest.raises(ValueError, match=r"memtrain\.wrap before accelerator\.prepare"):
        memtrain.wrap(model, prepared)


def test_the_environment_is_printed_in_plain_text_without_names_of_places():
    found = memtrain.collect_env()
    assert found["memtrain"] == memtrain.__version__
    assert {"python", "platform", "triton", "cuda", "C++ kernels"} <= found.keys()
    assert all(type(value) is str for value in found.values())
    assert not any("/" in value for name, value in found.items() if name != "cuda")


def test_another_default_device_changes_nothing():
    def run(where):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 80))
        x, y = torch.randn(40, 64), torch.randint(80, (40,))
        with where:  # a table made there has no data
            small = ["preset=balanced", "activations.min_elements=1"]
            optimizer = memtrain.optim.AdamW8bit(model.parameters(), min_elements=1)
            model, optimizer = memtrain.wrap(model, optimizer, [*small, "optim=none"])
            for _ in range(2):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return model[0].weight

    assert torch.equal(run(torch.device("cpu")), run(torch.device("meta")))


def replace_parameters(model, optimizer):
    """As accelerate's FSDP2 does in `prepare`: new parameters in the model and in the groups."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                new = torch.nn.Parameter(param.detach().clone())
                module._parameters[name] = new
                for group in optimizer.param_groups:
                    group["params"] = [new if p is param else p for p in group["params"]]


def test_rules_know_parameters_that_are_replaced_before_the_first_step():
    found = []
    for replaces in (False, True):
        model = make()
        name = max(model.named_parameters(), key=lambda each: each[1].numel())[0]
        rules = [{"parameter": name, "state": "exp_avg", "compressor": "identity"}]
        rules += [{"state": "exp_avg|exp_avg_sq", "compressor": "B128/DE-0"}]
        cfg = {"preset": "optimizer_only", "optim": {"rules": rules}}
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer = memtrain.wrap(model, optimizer, cfg)
        if replaces:
            replace_parameters(model, optimizer)
        losses = train(model, optimizer, 3)
        kept = optimizer.state[model.get_parameter(name)]["exp_avg"]
        found.append((losses, isinstance(kept, torch.Tensor)))
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize("cfg", [{"weights": "bf16+8"}, {"gradients": "release"}])
def test_replaced_parameters_of_split_weights_or_released_gradients_are_refused(cfg):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = memtrain.wrap(model, optimizer, {"preset": "optimizer_only", **cfg})
    replace_parameters(model, optimizer)
    with pytest.raises(RuntimeError, match=r"were replaced .*memtrain\.wrap after prepare"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:an average of a model with weights")
@pytest.mark.parametrize(
    "preset", [pytest.param("balanced", marks=pytest.mark.nightly), "all_four"]
)
def test_averages_of_a_wrapped_model_cost_their_weights_and_evaluate_as_plain_ones(preset):
    def run(averaged):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = memtrain.wrap(model, optimizer, preset)
        losses, average = [], None
        for _ in range(4):
            losses.append(model(torch.randn(32, 64)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            if averaged:
                average = average or AveragedModel(model)
                average.update_parameters(model)
        return torch.stack(losses), model, average

    losses, model, average = run(averaged=True)
    assert torch.equal(losses, run(averaged=False)[0])
    with LiveStorages() as live:
        copied = copy.deepcopy(average.module)
        assert live.nbytes() == sum(p.nbytes for p in model.parameters())
    dtype = copied[0].weight.dtype
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(dtype)
    plain.load_state_dict(average.module.state_dict())
    x = torch.randn(32, 64)
    with torch.no_grad():
        expected = plain(x.to(dtype))
        assert torch.equal(average.eval()(x), expected)
        assert torch.equal(copied.eval()(x), expected)


def test_a_lazy_module_is_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        memtrain.wrap(model, optimizer, "balanced")

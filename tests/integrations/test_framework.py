"""Integrations follow the framework's settings for gradients, or refuse; no framework is needed."""

import ast
import copy
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.peak.measure import measure
from memtrain.config.sources import load
from memtrain.integrations import accelerate
from memtrain.integrations.framework import for_framework
from memtrain.integrations.lightning import memtrain_callback
from memtrain.integrations.transformers import memtrain_trainer
from memtrain.plan.plan import make_plan
from memtrain.planner import fit


class Trainer:
    """As much of transformers' as the subclass touches."""

    def __init__(self, model, args, **accelerator):
        self.model, self.args, self.optimizer, self.clipped = model, args, None, 0
        self.accelerator = SimpleNamespace(**{"num_processes": 1, "is_fsdp2": False, **accelerator})

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW((model or self.model).parameters(), lr=1e-2)
        return self.optimizer

    def create_scheduler(self, num_training_steps):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def _clip_grad_norm(self, model):
        self.clipped += 1
        return nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return grad_norm

    def train(self, steps=2):
        self.create_optimizer()
        norms = []
        for k in range(steps * self.args.gradient_accumulation_steps):
            torch.manual_seed(k)
            self.model(torch.randn(8, 64)).square().mean().backward()
            if (k + 1) % self.args.gradient_accumulation_steps == 0:
                norm = self._clip_grad_norm(self.model) if self.args.max_grad_norm else None
                norms.append(self._get_grad_norm(self.model, grad_norm=norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return norms


def arguments(**changed):
    given = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    return SimpleNamespace(**{**given, **changed})


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def test_a_trainers_clipping_and_accumulation_go_into_the_config():
    trainer = memtrain_trainer(Trainer, "all_four")(model(), arguments())
    assert type(trainer).__name__ == "MemtrainTrainer"
    norms = trainer.train()
    release = memtrain.plan_of(trainer.model).config.release
    assert (release.clip, release.limit, release.accumulate) == ("previous", 1.0, 2)
    assert (trainer.clipped, norms) == (0, [None, norms[1]])
    assert 0 < norms[1] == pytest.approx(trainer.optimizer.norm, rel=10)
    trainer.train()  # again: it is wrapped once


def test_gradients_that_are_kept_are_the_trainers():
    trainer = memtrain_trainer(Trainer, "balanced")(model(), arguments())
    assert all(norm > 0 for norm in trainer.train())
    assert trainer.clipped == 2


def test_what_the_config_says_itself_stands():
    cfg = {"preset": "all_four", "release": {"clip": "value", "limit": 0.5, "accumulate": 3}}
    assert for_framework(cfg, norm=1.0, accumulate=8) == load(cfg)
    net = model()
    plan = make_plan(net, torch.optim.AdamW(net.parameters()), "all_four")
    assert for_framework(plan, value=2.0).release.limit == 2.0
    assert for_framework("balanced", norm=1.0, accumulate=8) == "balanced"


def test_in_ddp_gradients_are_kept_and_the_trainer_clips():
    several = {"num_processes": 2, "distributed_type": "MULTI_GPU"}
    trainer = memtrain_trainer(Trainer, "all_four")(model(), arguments(), **several)
    trainer.train(2)
    assert memtrain.plan_of(trainer.model).config.gradients == "keep"
    assert trainer.clipped == 2
    clipped = {"preset": "all_four", "release": {"clip": "value"}}
    trainer = memtrain_trainer(Trainer, clipped)(model(), arguments(), **several)
    with pytest.raises(ValueError, match=r"release\.clip='value' has no effect"):
        trainer.create_optimizer()


@pytest.mark.parametrize("each", [False, True])
def test_under_fsdp2_gradients_arrive_at_the_last_pass_or_at_each(each):
    """And released ones are wrapped when the parameters are the sharded ones, of two bytes."""
    state = SimpleNamespace(plugin_kwargs={"sync_each_batch": each})
    shards = {
        "num_processes": 2, "is_fsdp2": True, "distributed_type": "DistributedType.FSDP",
        "mixed_precision": "no", "gradient_state": state,
    }  # fmt: skip
    trainer = memtrain_trainer(Trainer, "all_four")(model(), arguments(), **shards)
    plain = trainer.create_optimizer()
    assert type(plain) is torch.optim.AdamW
    trainer.model = sharded = copy.deepcopy(trainer.model)  # as `prepare` replaces parameters
    plain.param_groups[0]["params"] = list(sharded.parameters())
    trainer.create_scheduler(4)
    assert {p.dtype for p in sharded.parameters()} == {torch.bfloat16}
    assert trainer.optimizer.accumulate == (2 if each else 1)
    assert trainer.optimizer.param_groups[0]["params"] == list(sharded.parameters())

    kept = memtrain_trainer(Trainer, "balanced")(model(), arguments(), **shards)
    assert kept.create_optimizer() is not plain
    assert memtrain.plan_of(kept.model).config.weights == "keep"
    mixed = {**shards, "mixed_precision": "bf16"}
    with pytest.raises(ValueError, match=r"weights='bf16\+8' under FSDP2 .*bf16=False"):
        memtrain_trainer(Trainer, "all_four")(model(), arguments(), **mixed).create_optimizer()


def test_each_fit_of_a_lightning_trainer_wraps_its_optimizer_and_clips(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    callback, net = memtrain_callback("all_four"), model()
    given = {"world_size": 1, "gradient_clip_val": 0.5, "gradient_clip_algorithm": None}
    trainer = SimpleNamespace(**given, accumulate_grad_batches=2, strategy=SimpleNamespace())
    for end in (callback.on_fit_end, callback.on_exception, callback.on_fit_end):
        trainer.optimizers = [torch.optim.AdamW(net.parameters())]
        callback.on_fit_start(trainer, net)
        assert trainer.gradient_clip_val is None
        (optimizer,) = trainer.strategy.optimizers
        assert (optimizer.clip, optimizer.limit, optimizer.accumulate) == ("previous", 0.5, 2)
        end(trainer, net)
        assert trainer.gradient_clip_val == 0.5


@pytest.mark.parametrize(
    ("cfg", "given", "message"),
    [
        ("balanced", {"activation_offloading": True}, r"innermost hooks.*allowed: False"),
        ("checkpointed", {"activation_offloading": True}, r"innermost hooks"),
        ("checkpointed", {"gradient_checkpointing": True}, r"recomputes layers itself .*False"),
    ],
)
def test_arguments_against_the_config_are_refused(cfg, given, message):
    with pytest.raises(ValueError, match=message):
        memtrain_trainer(Trainer, cfg)(model(), arguments(**given))
    memtrain_trainer(Trainer, "optimizer_only")(model(), arguments(**given))


def test_accelerates_accumulation_and_the_norm_go_into_the_config():
    net, accelerator = model(), SimpleNamespace(gradient_accumulation_steps=4, num_processes=1)
    optimizer = torch.optim.AdamW(net.parameters())
    _, optimizer = accelerate.wrap(accelerator, net, optimizer, "all_four", max_norm=2.0)
    assert (optimizer.accumulate, optimizer.clip, optimizer.limit) == (4, "previous", 2.0)


class Prepared(torch.optim.Optimizer):
    """As much as accelerate's `prepare` makes of an optimizer: what it has is the inner one's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)
    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, groups: setattr(self.optimizer, "param_groups", groups),
    )

    @state.setter
    def state(self, state):
        self.optimizer.state = state


def test_what_is_reported_of_a_prepared_optimizer_leaves_it_as_it_was():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(32, 64)
    inner = torch.optim.AdamW(model.parameters())
    prepared, groups = Prepared(inner), [dict(group) for group in inner.param_groups]
    reports = [
        memtrain.audit(model, x, optimizer=optimizer, peak=True) for optimizer in (inner, prepared)
    ]
    assert reports[0].totals() == reports[1].totals()
    assert [r.timeline.peak.nbytes for r in reports] == [reports[0].timeline.peak.nbytes] * 2
    plans = [make_plan(model, optimizer, "balanced") for optimizer in (inner, prepared)]
    assert plans[0].listing() == plans[1].listing()
    fit(model, prepared, x, "1GiB")
    measure(model, prepared, x)
    after = [dict(group) for group in inner.param_groups]
    assert [list(map(id, group.pop("params"))) for group in after] == [
        list(map(id, group.pop("params"))) for group in groups
    ]
    assert after == groups
    assert not inner.state


def test_axolotls_plugin_wraps_its_trainer_and_says_so(monkeypatch, caplog):
    """As its plugin manager (axolotl 0.19) calls it; axolotl itself is not needed."""
    for name in ("axolotl", "axolotl.core", "axolotl.core.trainers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.core.trainers"].AxolotlTrainer = Trainer
    dotted = "memtrain.integrations.axolotl.MemtrainPlugin"
    module, _, cls = dotted.rpartition(".")
    plugin = getattr(importlib.import_module(module), cls)()
    plugin.register({"memtrain": "all_four", "plugins": [dotted]})
    assert "memtrain is on: memtrain='all_four'" in caplog.text
    trainer = plugin.get_trainer_cls({})(model(), arguments())
    trainer.train()
    assert memtrain.plan_of(trainer.model).config.release.accumulate == 2
    with pytest.raises(ValueError, match="rl='dpo'"):
        plugin.register({"rl": "dpo"})
    with pytest.raises(ValueError, match=r"allowed: .*balanced"):
        plugin.register({"memtrain": "blanced"})


def made_by_a_dotted_name(name, arguments, params, lr):
    """As kohya's scripts make an optimizer: what they import, parse, call and log."""
    options = {key: ast.literal_eval(value) for key, value in (a.split("=") for a in arguments)}
    module, _, last = name.rpartition(".")
    cls = getattr(importlib.import_module(module), last)
    optimizer = cls(params, lr=lr, **options)
    assert f"{cls.__module__}.{cls.__name__}".endswith(last)
    assert not hasattr(optimizer, "train")  # it would be called, for schedule-free ones
    return optimizer


def test_a_dotted_optimizer_type_is_made_as_kohyas_scripts_make_one():
    net = model()
    groups = [{"params": list(net.parameters()), "lr": 1e-3}]
    given = ["weight_decay=0.1", "betas=(0.9, 0.99)", "second='identity'"]
    optimizer = made_by_a_dotted_name("memtrain.optim.AdamW4bit", given, groups, 1e-4)
    net(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    assert (optimizer.param_groups[0]["lr"], optimizer.defaults["lr"]) == (1e-3, 1e-4)
    assert isinstance(optimizer.state[net[0].weight]["exp_avg_sq"], torch.Tensor)

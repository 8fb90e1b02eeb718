"""Plans as YAML files: the same decisions after a round trip, and mistakes with their key."""

import pytest
import torch
import yaml
from torch import nn

import memtrain
from memtrain.compressors import (
    Block,
    DerivativeCode,
    Factored,
    Group,
    Host,
    Identity,
    Integers,
    Patch,
    Rank1,
    Samples,
)
from memtrain.compressors.auto import Auto
from memtrain.config.sources import ActivationRule, Activations, Config, load
from memtrain.plan.compressor_specs import build_compressor, compressor_spec


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128), nn.ReLU(),
        nn.Linear(128, 8),
    )  # fmt: skip


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def planned(cfg, model=None, batch=X):
    model = model or make()
    return memtrain.make_plan(model, torch.optim.AdamW(model.parameters()), cfg, batch=batch)


def decisions(plan):
    return [(e.kind, e.site, e.nbytes, e.planned, e.compressor) for e in plan.entries()]


@pytest.mark.parametrize(
    "preset", ["balanced", "all_four", "gact4", "actnn_l4", "fewbit3", "exact"]
)
def test_a_round_trip_decides_the_same(preset, tmp_path):
    plan = planned(preset)
    path = tmp_path / "plan.yaml"
    plan.save(path)
    again = planned(str(path))
    assert decisions(again) == decisions(plan)
    assert yaml.safe_load(again.to_yaml()) == yaml.safe_load(plan.to_yaml())


def test_a_plan_without_a_batch_carries_its_rules():
    plan = planned("smallest", batch=None)
    config = load(yaml.safe_load(plan.to_yaml()))
    assert config.activations.sites == {}
    assert config.activations.rules == plan.config.activations.rules
    assert decisions(planned(config)) == decisions(planned("smallest"))


@pytest.mark.parametrize(
    "compressor",
    [
        Identity(), Group(bits=2, group_size=64), DerivativeCode(bits=2, function="silu"),
        DerivativeCode(bits=3, function="leaky_relu", parameters=(0.1,)), Integers(limit=7),
        Samples(bits=(3, 2)), Host(inner=Group(bits=3)),
        Block(bits=8), Rank1(), Factored(), Patch(),
        Auto(template=Group(group_size=128)), Auto(template=Host(inner=Samples())),
    ],
    ids=repr,
)  # fmt: skip
def test_build_reads_what_spec_writes(compressor):
    assert build_compressor(compressor_spec(compressor)) == compressor


def test_a_plan_is_edited_by_hand():
    text = planned("balanced").to_yaml()
    (line,) = [line for line in text.splitlines() if line.startswith("    1 / gelu / input:")]
    edited = text.replace(line, "    1 / gelu / input: {name: group, bits: 8}")
    config = load(yaml.safe_load(edited))
    rows = {entry.site: entry.planned for entry in planned(config).entries()}
    assert rows["1 / gelu / input"] == 32 * 256 + 32 * 4  # a byte an element, two bf16 a group


def test_the_file_reads_like_this():
    layers = nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 8)
    model = nn.Sequential(*layers)
    plan = memtrain.make_plan(model, torch.optim.AdamW(model.parameters()), "balanced", batch=X)
    lines = plan.to_yaml().splitlines()
    assert "memtrain_plan: 1" in lines
    assert "seed: 0" in lines
    assert "weights: keep" in lines
    assert (
        "    0 / linear / input: {name: group, bits: 4, group_size: 128, whole_rows: true}  "
        "# 0 B; the model's own input: stays alive anyway"
    ) in lines
    assert "    1 / gelu / input: {name: derivative, bits: 3}  # 1,536 B" in lines
    assert any(
        line.startswith(
            "    0.weight / adamw / exp_avg: {name: block, bits: 4, rounding: stochastic}"
        )
        for line in lines
    )


HEAD = "memtrain_plan: 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "seed: [1", "broken.yaml', line 2"),
        (HEAD + "seed: 0\nseed: 1\n", "broken.yaml', line 3: found duplicate key seed"),
        (HEAD + "sead: 0\n", "broken.yaml': unknown key 'sead'; did you mean 'seed'?"),
        (HEAD + "preset: exact\n", "broken.yaml': unknown key 'preset'"),
        (HEAD + "seed: x\n", "broken.yaml': seed: Value 'x'"),
        (HEAD + "weights: bf17\n", "broken.yaml': weights='bf17'"),
        (HEAD + "activations:\n  rulez: []\n", "broken.yaml': unknown key 'activations.rulez'"),
        (HEAD + "activations:\n  sites:\n    a / b: keep\n", "site 'a / b'"),
        (
            HEAD + "optim:\n  sites:\n    0.weight / b / c: B7\n",
            "optim.sites.'0.weight / b / c': compressor 'B7' is unknown",
        ),
        (
            HEAD + "activations:\n  sites:\n    1 / b / c: keep\n    1 / b / d: {name: groop}\n",
            "activations.sites.'1 / b / d': unknown compressor 'groop'; did you mean 'group'",
        ),
        (
            HEAD + "activations:\n  sites:\n    1 / b / c: {name: group, bits: 77}\n",
            "activations.sites.'1 / b / c': ",
        ),
        ("memtrain_plan: 2\n", "broken.yaml': memtrain_plan=2; allowed: 1"),
        (HEAD + "<<<<<<< ours\nseed: 1\n", "broken.yaml', line"),
        (HEAD + "activations: 3\n", "broken.yaml': activations=3 must be a mapping"),
        ("- a\n", "broken.yaml': a config is a mapping of keys, not ListConfig"),
        ("only words", "broken.yaml': "),
    ],
)
def test_a_corrupt_file_fails_with_its_key_or_line(text, message, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((ValueError, TypeError)) as caught:
        memtrain.wrap(model, optimizer, str(path))
    assert message in str(caught.value)
    assert not hasattr(model, "_memtrain")


def test_a_config_in_yaml_still_is_one(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("preset: smallest\nseed: 5\n")
    assert planned(path).config.seed == 5
    assert planned(path).config.activations.rules == planned("smallest").config.activations.rules


def test_a_plan_of_another_model_names_the_sites_that_do_not_exist(tmp_path):
    path = tmp_path / "plan.yaml"
    planned("balanced").save(path)
    other = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(ValueError, match="do not exist") as caught:
        memtrain.wrap(other, optimizer, path)
    assert "3 / linear / input" in str(caught.value)
    assert "0 / linear / input" not in str(caught.value)
    assert not hasattr(other, "_memtrain")
    assert type(optimizer) is torch.optim.AdamW


def test_ops_that_do_not_exist_are_named_where_a_batch_shows_it():
    text = HEAD + "activations:\n  sites:\n    1 / gelo / input: keep\n"
    with pytest.raises(ValueError, match="1 / gelo / input"):
        planned(load(yaml.safe_load(text)))
    assert planned(load(yaml.safe_load(text)), batch=None).config.activations.sites


def test_states_that_do_not_exist_are_named(tmp_path):
    model, path = make(), tmp_path / "plan.yaml"
    planned("balanced").save(path)
    with pytest.raises(ValueError, match="the optimizer has no such states"):
        memtrain.make_plan(model, torch.optim.SGD(model.parameters(), momentum=0.9), path)


def test_a_plan_that_keeps_everything_leaves_the_model_alone():
    text = HEAD + "activations:\n  sites:\n    1 / gelu / input: keep\n"
    model = make()
    memtrain.wrap(model, torch.optim.AdamW(model.parameters()), load(yaml.safe_load(text)))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_compressor_that_no_config_names_cannot_be_saved():
    class Own(Group):
        pass

    config = Config(activations=Activations(rules=[ActivationRule(compressor=Own())]))
    with pytest.raises(ValueError, match="cannot be written"):
        planned(config).to_yaml()


def test_saving_needs_a_name_that_wrap_takes(tmp_path):
    with pytest.raises(ValueError, match=r"names that end in \.yaml"):
        planned("balanced").save(tmp_path / "plan.txt")

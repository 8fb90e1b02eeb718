"""Six ways to give a config, and sizes; every mistake names the value and what is allowed."""

import re

import hydra
import pytest
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from memtrain.config.sizes import UNITS, format_size, parse_size
from memtrain.config.sources import Config, compose, load, options
from memtrain.plan.compressor_specs import build_compressor
from memtrain.plan.rules import expand

PRESETS = options("preset")


def test_presets_are_the_documented_ones():
    documented = {"activations_only", "balanced", "exact", "optimizer_only", "smallest"}
    assert documented | {"fewbit3", "actnn_fewbit"} <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_its_compressors_build(preset):
    config = load(preset)
    for rule in (*config.activations.rules, *config.optim.rules):
        build_compressor(rule.compressor)
    touched = {"all_four": ("bf16+8", "release"), "all_four_2bit": ("bf16+sr", "release")}
    assert (config.weights, config.gradients) == touched.get(preset, ("keep", "keep"))


def test_all_forms_give_the_same_config(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: smallest\nseed: 3\n")
    forms = [
        ["preset=smallest", "seed=3"],
        {"preset": "smallest", "seed": 3},
        OmegaConf.create({"preset": "smallest", "seed": 3}),
        path,
        str(path),
        load(["preset=smallest", "seed=3"]),
    ]
    assert len({repr(load(form)) for form in forms}) == 1
    assert load(None) == load("balanced") == Config(**vars(load("balanced")))


def test_presets_say_what_the_documentation_says():
    balanced, smallest = load("balanced"), load("smallest")

    def of(config):
        return {rule.op: rule.compressor for rule in config.activations.rules}

    assert of(balanced)["@nonlinear"] == {"name": "derivative", "bits": 3}
    assert of(balanced)["@saturating"] == "keep"
    assert of(balanced)["*"] == {"name": "group", "bits": 4, "group_size": 128}
    assert [r.compressor for r in balanced.optim.rules] == ["factored", "B128/DE+SR", "B128/DE"]
    assert of(smallest)["@nonlinear"] == {"name": "derivative", "bits": 2}
    assert of(smallest)["@saturating"] == "keep"
    assert of(smallest)["*"] == {"name": "group", "bits": 2}
    assert smallest.optim.rules == balanced.optim.rules


def test_a_field_of_a_rule_is_overridden_by_its_index():
    config = load(["activations.rules.0.compressor.bits=2"])
    assert config.activations.rules[0].compressor["bits"] == 2


def test_a_compressor_that_is_named_replaces_the_presets():
    host = {"name": "host", "inner": {"name": "group", "bits": 4}}
    given = "activations.recompute_inputs={name: host, inner: {name: group, bits: 4}}"
    for cfg in (
        ["preset=checkpointed", given],
        {"preset": "checkpointed", "activations": {"recompute_inputs": host}},
    ):
        assert load(cfg).activations.recompute_inputs == host
    fewer = load(["preset=checkpointed", "activations.recompute_inputs={bits: 4}"])
    assert fewer.activations.recompute_inputs == {"name": "group", "bits": 4}
    cast = load(["activations.rules.1.compressor={name: cast}"])
    assert cast.activations.rules[1].compressor == {"name": "cast"}


MISTAKES = {
    "preset": ("smalest", ValueError, "did you mean 'smallest'"),
    "preset_override": (["preset=foo"], ValueError, "unknown preset 'foo'; allowed: activ"),
    "no_key": (["exact"], ValueError, "'exact' has no '='; did you mean 'preset=exact'. allowed"),
    "preset_key": ({"preset": "exac"}, ValueError, "did you mean 'exact'"),
    "override_key": (["activation.min_elements=3"], ValueError, "activations.min_elements"),
    "dict_key": ({"sed": 3}, ValueError, "unknown key 'sed'; did you mean 'seed'"),
    "nested_key": ({"optim": {"rule": []}}, ValueError, "'optim.rule'; did you mean 'rules'"),
    "rule_key": (
        {"activations": {"rules": [{"opp": "x"}]}}, ValueError, "'activations.rules.0.opp'",
    ),
    "type": ({"seed": "x"}, TypeError, "seed"),
    "override_type": (["activations.min_elements=abc"], TypeError, "activations.min_elements=abc"),
    "range": (["activations.min_elements=-1"], ValueError, "min_elements=-1 is out of range"),
    "weights": (["weights=bf17"], ValueError, "weights='bf17' is unknown; did you mean 'bf16'?"),
    "no_file": ("nowhere.yaml", FileNotFoundError, "nowhere.yaml"),
    "no_config": (3, TypeError, "cfg is a int; allowed: a preset's name"),
    "not_a_mapping": ({"activations": 3}, TypeError, "activations"),
    "a_group": ({"optim": "factored_8bit"}, TypeError, "overrides may name a group: .'optim=fact"),
    "added_key": (["+foo=3"], ValueError, "unknown key 'foo'"),
    "added_inner": (["+release.clipp=value"], ValueError, "'release.clipp'; did you mean 'clip'?"),
}  # fmt: skip


@pytest.mark.parametrize(("cfg", "error", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_name_the_value_and_what_is_allowed(cfg, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        load(cfg)


def test_composing_inside_a_running_hydra_app_leaves_it_alone():
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("memtrain.configs", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose(["preset=exact"])
        assert GlobalHydra.instance().hydra is outer


SPECS = {
    "name": ("B128/DEE", ValueError, "B128/DE"),
    "registry": ({"name": "grup"}, ValueError, "did you mean 'group'"),
    "no_mapping": ("group", ValueError, "'group' is a mapping: {name: group, ...}"),
    "inner": ({"name": "host"}, ValueError, "'host' without inner"),
    "field": ({"name": "group", "bit": 4}, ValueError, "did you mean 'bits'"),
    "range": ({"name": "group", "bits": 9}, ValueError, "9"),
    "type": ({"name": "group", "bits": "four"}, TypeError, "four"),
    "form": (4, TypeError, "neither a name nor a mapping"),
}


@pytest.mark.parametrize(("spec", "error", "message"), SPECS.values(), ids=SPECS.keys())
def test_mistakes_in_a_compressor(spec, error, message):
    with pytest.raises(error, match=message):
        build_compressor(spec)


def test_a_family_of_ops_is_expanded_and_a_wrong_one_is_refused():
    assert "gelu" in expand("@nonlinear")
    assert expand("a|b*") == ("a", "b*")
    with pytest.raises(ValueError, match="did you mean '@nonlinear'"):
        expand("@nonlinears")


def test_the_piecewise_family_is_what_one_bit_serves():
    from memtrain.compressors.fewbit.step_function import EXACT

    clamps = {"clamp", "clip", "clamp_min", "clamp_max"}  # served by hardtanh's and threshold's
    assert set(expand("@piecewise")) == set(EXACT) | clamps


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("activations.recompute=@blocks", "activations.recompute: must be a list, in brackets"),
        ("seed=abc", "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        ("strict=maybe", "strict: Value 'maybe' is not a valid bool"),
    ],
)
def test_a_value_of_the_wrong_type_is_reported_with_the_right_one(override, message):
    with pytest.raises(TypeError, match=re.escape(message)) as error:
        compose([override])
    assert override in str(error.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24_000_000_000),
        ("24GiB", 25_769_803_776),
        (" 24 gib ", 25_769_803_776),
        ("1.5KiB", 1536),
        (".5 MiB", 524_288),
        ("80.kB", 80_000),
        ("0.1TB", 100_000_000_000),
        ("2TiB", 2_199_023_255_552),
        ("7B", 7),
        ("0", 0),
        ("123", 123),
        (123, 123),
        # a float would lose the last digits
        ("123456789.123456789GB", 123_456_789_123_456_789),
        ("1.9B", 1),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["24 potatoes", "24G", "GiB", "", "-1GiB", -1, "1e9", "1.5", "1,5GiB", "24GiB!", "nan", "inf",
     "٣GiB", "1 2GiB"],
)  # fmt: skip
def test_the_error_of_a_wrong_size_names_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"budget=.* is not a size; allowed: .*GiB"):
        parse_size(text, "budget")


@pytest.mark.parametrize("value", [1.5, None, True, [1]])
def test_what_is_neither_text_nor_a_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"size=.* is of type"):
        parse_size(value)


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_a_whole_number_of_any_unit_is_exact(number, unit):
    assert parse_size(f"{number}{unit}") == number * UNITS[unit]
    assert parse_size(f"{number} {unit.upper()}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 KiB"),
        (2**20 - 1, "1024.00 KiB"),
        (2**20, "1.00 MiB"),
        (2**40, "1,024.00 GiB"),
        (-(2**21), "-2.00 MiB"),
    ],
)
def test_sizes_are_shown(nbytes, text):
    assert format_size(nbytes) == text


def test_a_file_of_a_group_that_does_not_fit_the_schema_is_named(monkeypatch):
    def broken(name, overrides):
        if overrides:
            raise HydraException("In 'preset/exact': Key 'colour' not in 'Optim'")
        return composed(name)

    composed = hydra.compose
    monkeypatch.setattr(hydra, "compose", broken)
    for overrides in (["preset=exact"], ["preset=exact", "activations.min_elements=1"]):
        with pytest.raises(TypeError, match="'preset=exact': In 'preset/exact': Key 'colour'"):
            compose(overrides)

import pytest

from memtrain.config import sources as base
from memtrain.training.data import build_source
from memtrain.training.networks import build_model
from memtrain.training.settings import PlannerConfig, compose, from_mapping

TEXT = {"name": "text", "path": __file__}


@pytest.mark.parametrize("experiment", base.options("experiment"))
@pytest.mark.parametrize("preset", ["exact", "smallest"])
def test_every_experiment_composes_with_presets(experiment, preset):
    cfg = compose([f"experiment={experiment}", f"preset={preset}", "training.steps=7"])
    config = from_mapping(cfg)
    assert config.experiment == experiment
    assert config.training.steps == 7
    own = base.from_mapping(cfg)
    assert own.activations == base.load(preset).activations
    assert own.optim == base.load(preset).optim


def test_default_is_the_gpt_with_balanced():
    config = from_mapping(compose([]))
    assert config.experiment == "gpt_stdlib"
    assert config.model["name"] == "gpt"
    assert config.activations == base.load("balanced").activations
    assert config.model["context"] == config.data["sequence"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment=smok", "did you mean 'smoke'"),
        ("preset=balancd", "did you mean 'balanced'"),
        ("training.step=3", r"training\.steps"),
        ("model.widht=3", r"model\.width"),
        ("training.steps=0", r"training.steps=0 is out of range; allowed: at least 1"),
        ("training.runs=[]", "training.runs=.. is empty"),
        ("training.runs=[plane]", "did you mean 'plain'"),
        ("training.runs=[plain,plain]", "names a run twice"),
        ("training.device=gpu", "training.device='gpu' is unknown"),
        ("training.final_lr=2", "training.final_lr=2.0 is out of range"),
        ("training.clip=nan", "training.clip=nan is out of range"),
        ("optimizer.lr=0", "optimizer.lr=0.0 is out of range; allowed: above 0"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0 is out of range"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
    ],
)
def test_bad_values(override, message):
    with pytest.raises(ValueError, match=message):
        from_mapping(compose([override]))


def test_wrong_type():
    with pytest.raises(TypeError, match=r"training\.steps"):
        from_mapping(compose(["training.steps=many"]))


@pytest.mark.parametrize(
    ("build", "spec", "message"),
    [
        (build_source, {"name": "txt"}, "did you mean 'text'"),
        (build_source, {}, "data.name='None' is unknown"),
        (build_source, {**TEXT, "sequense": 4}, "did you mean 'sequence'"),
        (build_source, {**TEXT, "validation": float("nan")}, "data.validation=nan is out of range"),
        (build_source, {**TEXT, "sequence": 10**7}, "at least one row of data.sequence=10"),
        (build_model, {"name": "gtp"}, "did you mean 'gpt'"),
        (build_model, {"name": "gpt", "widht": 3}, "did you mean 'width'"),
        (build_model, {"name": "gpt", "width": 10, "heads": 4}, "not a multiple of model.heads=4"),
        (build_model, {"name": "gpt", "layers": 0}, "model.layers=0 is out of range"),
    ],
)
def test_bad_data_and_models(build, spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec, seed=0)


def test_wrong_values_are_named_before_anything_runs():
    with pytest.raises(ValueError, match="unknown allow 'all'"):
        PlannerConfig(allow=["all"])
    config = from_mapping(compose(["experiment=smoke", "budget=2MB", "planner.max_error=0.5"]))
    assert (config.budget, config.planner.max_error) == ("2MB", 0.5)

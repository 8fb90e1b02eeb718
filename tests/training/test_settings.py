import pytest

from memtrain.config import sources as base
from memtrain.training.settings import compose, from_mapping


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

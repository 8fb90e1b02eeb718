import pytest

from memtrain.training.data import build_source

TEXT = {"name": "text", "path": __file__}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "txt"}, "did you mean 'text'"),
        ({}, "data.name='None' is unknown"),
        ({**TEXT, "sequense": 4}, "unknown key 'data.sequense'; did you mean 'sequence'"),
        ({**TEXT, "validation": float("nan")}, "data.validation=nan is out of range"),
        ({**TEXT, "sequence": 10**7}, "allowed: at least one row of data.sequence=10000000"),
    ],
)
def test_bad_data_config(spec, message):
    with pytest.raises(ValueError, match=message):
        build_source(spec, seed=0)

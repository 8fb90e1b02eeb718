"""The search space of the planner's test model, gathered once."""

import pytest

from memtrain.config.sources import Config
from memtrain.planner import Goal
from memtrain.planner.search_space import gather
from tests.planner.nets import X, make


@pytest.fixture(scope="module")
def space():
    return gather(*make(), Config(), X, Goal())

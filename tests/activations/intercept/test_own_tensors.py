"""A model's parameters and buffers, whichever modules hold them now."""

import torch
from torch import nn

from memtrain.activations.intercept.own_tensors import OwnTensors


class Table(nn.Module):
    """Equal to every other one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.randn(4))

    def __eq__(self, other):
        return isinstance(other, Table)

    __hash__ = nn.Module.__hash__


def test_own_tensors_are_those_of_the_modules_that_are_there_not_of_equal_ones():
    model = nn.Sequential(Table(), nn.Linear(2, 2))
    own = OwnTensors()
    before = own.find(model)
    model[0] = Table()
    assert before[-1] is not model[0].values
    assert own.find(model)[-1] is model[0].values

"""The tensors that an optimizer holds: each found, none counted twice."""

import torch
from torch import nn

from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import state_tensors
from memtrain.compressors import Key


def measure_states(optimizer):
    return storage_nbytes(state_tensors(optimizer))


def _stepped(optimizer_class, **options):
    model = nn.Linear(10, 5)
    optimizer = optimizer_class(model.parameters(), **options)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return optimizer


def test_adamw_states_by_hand():
    optimizer = _stepped(torch.optim.AdamW)
    # two moments of 55 floats, and a step counter of one float for each of two parameters
    assert measure_states(optimizer) == 4 * (2 * 55 + 2)


def test_sgd_without_momentum_holds_nothing():
    assert measure_states(_stepped(torch.optim.SGD, lr=0.1)) == 0


def test_bytes_hidden_outside_state_count():
    optimizer = _stepped(torch.optim.SGD, lr=0.1)
    optimizer.buffers = [{"codes": (torch.zeros(3), torch.zeros(4))}]
    optimizer.inner = _stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    inner = 55 * 4 + 55 * 4  # its momentum, and its parameters, which are not the outer one's
    assert measure_states(optimizer) == 7 * 4 + inner
    optimizer.loop = optimizer.buffers  # seen twice, and a cycle
    optimizer.buffers.append(optimizer.buffers)
    assert len(state_tensors(optimizer)) == len({id(t) for t in state_tensors(optimizer)})


def test_views_of_states_count_once():
    optimizer = _stepped(torch.optim.SGD, lr=0.1)
    whole = torch.zeros(100)
    optimizer.state["x"] = {"a": whole[:50], "b": whole[50:], "key": Key(seed=1)}
    assert measure_states(optimizer) == 400

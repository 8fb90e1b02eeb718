"""The two ops of compiled graphs: their random bits, whatever order a compiler runs them in."""

from types import SimpleNamespace

import torch

from memtrain.activations.saved import payload_ops
from memtrain.activations.saved.flatten import flatten
from memtrain.compressors import Group


class Forwards(SimpleNamespace):
    __hash__ = object.__hash__


def codes(forwards, graph, places):
    """Payloads of a graph's run, by the places of its ops, in the order in which those run."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    group = Group(bits=2)
    form = payload_ops.form_of(group, flatten(x)[1], Group.parts)
    counter = payload_ops.counter_of(forwards)
    found = {
        place: payload_ops.compress(x, form, (0, place, counter, graph, place))[0]
        for place in places
    }
    return torch.stack([found[place] for place in sorted(places)])


def test_runs_of_a_graph_round_alike_in_any_order_and_count_once():
    graph, other = payload_ops.graph_number(), payload_ops.graph_number()
    runs = []
    for order in ([0, 1, 2], [2, 0, 1]):
        forwards = Forwards(step=5)
        first, second = codes(forwards, graph, order), codes(forwards, graph, order[::-1])
        third = codes(forwards, other, [3, *order])
        assert forwards.step == 8
        runs.append((first, second, third[:3]))
    assert all(map(torch.equal, *runs))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][1], runs[0][2])


def test_a_run_that_broke_off_does_not_reach_into_the_next():
    forwards, graph = Forwards(step=0), payload_ops.graph_number()
    codes(forwards, graph, [0, 1])  # of 3
    forwards.step = 7  # a forward began, or a checkpoint was loaded
    found = codes(forwards, graph, [2, 0, 1])
    assert forwards.step == 8
    assert torch.equal(found, codes(Forwards(step=7), graph, [0, 1, 2]))

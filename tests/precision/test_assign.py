"""Assignments against their definitions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.config.sources import load, options
from memtrain.precision.assignment import Precision, assign, group_elements
from memtrain.precision.graph import Graph, GraphTensor
from memtrain.precision.state import PrecisionState

VALUE = st.tuples(st.integers(1, 50), st.booleans(), st.booleans())
GROUPS = st.lists(st.lists(VALUE, min_size=1, max_size=4), min_size=1, max_size=7)
RATIOS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), st.floats(0, 1))


def graph_from(groups):
    values = [
        GraphTensor(f"{group}.{index}", numel, group, weight=weight, gradient=gradient)
        for group, members in enumerate(groups)
        for index, (numel, weight, gradient) in enumerate(members)
    ]
    return Graph(tuple(values), ("gemm",) * (len(groups) - 1))


@settings(max_examples=150, deadline=None)
@given(GROUPS, RATIOS)
def test_the_chosen_set_is_the_shortest_prefix_of_whole_groups(groups, ratio):
    graph = graph_from(groups)
    asked = Precision(assignment="size_ordered", ratio=ratio)
    (forward, backward), own, total = assign(graph, asked), group_elements(graph), graph.elements
    low = {value.group for value in graph.tensors if value.name in forward}
    # whole groups, and both sides of every activation
    assert forward == {value.name for value in graph.tensors if value.group in low}
    assert backward == {
        value.name for value in graph.tensors
        if value.group in low and value.gradient and not value.weight
    }  # fmt: skip
    # weight gradients are counted in the prefix ...
    reached = sum(own[group] for group in low)
    assert reached == sum(
        value.numel * (2 if value.gradient else 1) for value in graph.tensors if value.group in low
    )
    assert reached >= ratio * total
    # ... which is the shortest: without any of its groups that the order could end with, too little
    rest = {group: size for group, size in own.items() if group not in low}
    if low:
        last = max(low, key=lambda group: (-own[group], group))
        assert reached - own[last] < ratio * total
        assert all((-size, g) > (-own[last], last) for g, size in rest.items())
    # the reported ratio counts what really is low
    state = PrecisionState(asked)
    state.assign(graph)
    weights = sum(
        value.numel for value in graph.tensors
        if value.group in low and value.weight and value.gradient
    )  # fmt: skip
    assert state.ratio * total == pytest.approx(reached - weights, abs=1e-6)
    assert state.demoted_ratio * total == pytest.approx(reached, abs=1e-6)
    assert state.bits == 16 * total - 8 * (reached - weights)
    if ratio in (0.0, 1.0):
        assert low == (set(own) if ratio else set())


def by_hand():
    return Graph(
        (
            GraphTensor("x", 6, 0, gradient=False, gemm_input=True),
            GraphTensor("w1", 9, 0, weight=True, gemm_input=True),
            GraphTensor("y", 6, 1, gemm_output=True), GraphTensor("norm", 2, 1, weight=True),
            GraphTensor("z", 6, 1, gemm_input=True),
            GraphTensor("w2", 8, 1, weight=True, gemm_input=True),
            GraphTensor("out", 4, 2, gemm_output=True), GraphTensor("soft", 4, 2),
        ),
        ("a / linear", "b / linear"),
    )  # fmt: skip


def test_size_order_by_hand():
    # groups of 24, 44 and 16 of 84 elements
    chosen = [
        sorted(assign(by_hand(), Precision(assignment="size_ordered", ratio=ratio))[0])
        for ratio in (0.5, 0.53, 1)
    ]
    assert chosen[0] == ["norm", "w2", "y", "z"]
    assert chosen[1] == sorted([*chosen[0], "w1", "x"])
    assert len(chosen[2]) == 8


def test_uniform_is_all_of_it():
    forward, backward = assign(by_hand(), Precision(assignment="uniform"))
    assert forward == {value.name for value in by_hand().tensors}
    assert backward == {"y", "z", "out", "soft"}


def test_operator_is_what_gemms_read_and_the_gradients_of_what_they_give():
    inputs, outputs = {"x", "w1", "z", "w2"}, {"y", "out"}
    assert assign(by_hand(), Precision(assignment="operator")) == (inputs, outputs)
    wide = assign(by_hand(), Precision(assignment="operator_out"))
    assert wide == (inputs | outputs, outputs)


def test_first_and_last_layers_may_stay_high():
    ends = {"keep_first": True, "keep_last": True}
    assert assign(by_hand(), Precision(assignment="operator", **ends)) == ({"z", "w2"}, set())
    sized = assign(by_hand(), Precision(assignment="size_ordered", ratio=1, **ends))
    assert sized[0] == {"y", "norm", "z", "w2"}
    assert assign(by_hand(), Precision(assignment="uniform", **ends))[0] == sized[0]


MISTAKES = {
    "assignment": ({"assignment": "sized"}, "'sized'; allowed: fp32, uniform"),
    "ratio_above": ({"ratio": 1.5}, "ratio=1.5; allowed: 0 to 1"),
    "ratio_below": ({"ratio": -0.1}, "ratio=-0.1"),
    "promotion": ({"promotion": 0.0}, "promotion=0.0"),
    "no_exponent": ({"low": "1-0-7"}, "exponent_bits=0"),
    "too_many_bits": ({"low": "1-8-12"}, "21 bits with the sign; allowed: 3 to 16"),
    "unknown_format": ({"high": "fp24"}, "precision.high='fp24'.*allowed: "),
    "backward_format": ({"low_backward": "x"}, "precision.low_backward='x'"),
    "order": ({"low": "fp16", "high": "e4m3fn"}, "fewer bits than low"),
    "scale": ({"initial_scale": 3.0}, "initial_scale=3.0; allowed: powers of two"),
    "scaling": ({"loss_scale": "yes"}, "loss_scale='yes'"),
    "interval": ({"growth_interval": 0}, "growth_interval=0"),
}


@pytest.mark.parametrize(("fields", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_name_the_value_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        Precision(**fields)


@pytest.mark.parametrize("name", options("precision"))
def test_every_config_file_composes(name):
    found = load([f"precision={name}", "activations=none", "optim=none"]).precision
    assert found.assignment == name
    assert (found.promotion is None) == (name in ("uniform", "operator", "operator_out"))
    assert (found.keep_first, found.keep_last) == ((name.startswith("operator"),) * 2)


def test_fields_are_given_in_every_form():
    expected = Precision(assignment="size_ordered", ratio=0.3)
    assert load(["precision=size_ordered", "precision.ratio=0.3"]).precision == expected
    assert load({"precision": {"assignment": "size_ordered", "ratio": 0.3}}).precision == expected
    with pytest.raises(ValueError, match=r"precision\.ratio=3.0; allowed: 0 to 1"):
        load({"precision": {"ratio": 3.0}})
    with pytest.raises(ValueError, match=r"unknown key 'precision\.rato'; did you mean 'ratio'"):
        load({"precision": {"rato": 0.3}})

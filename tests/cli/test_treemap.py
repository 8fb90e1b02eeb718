"""Treemaps: areas in proportion, nothing outside, nothing on top of another."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.audit.report import Report, Row
from memtrain.cli.render.svg_treemap import HEIGHT, WIDTH, tree, treemap
from memtrain.cli.render.treemap import Box, squarify

SIZES = st.floats(1.0, 1e4)


@given(st.lists(SIZES, min_size=1, max_size=40), SIZES, SIZES)
def test_areas_fill_the_box_in_proportion(values, width, height):
    values = sorted(values, reverse=True)
    boxes = squarify(values, Box(3.0, 5.0, width, height))
    scale = width * height / sum(values)
    for value, box in zip(values, boxes, strict=True):
        assert box.width * box.height == pytest.approx(value * scale, rel=1e-6)
        assert box.x >= 3 - 1e-6 * width
        assert box.y >= 5 - 1e-6 * height
        assert box.x + box.width <= 3 + width * (1 + 1e-6)
        assert box.y + box.height <= 5 + height * (1 + 1e-6)


@given(st.lists(SIZES, min_size=2, max_size=12))
def test_boxes_do_not_overlap(values):
    boxes = squarify(sorted(values, reverse=True), Box(0.0, 0.0, 300.0, 200.0))
    for index, a in enumerate(boxes):
        for b in boxes[:index]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(wide, high) < 1e-6


def test_equal_values_make_squares():
    boxes = squarify([1.0] * 9, Box(0.0, 0.0, 30.0, 30.0))
    assert {(round(box.width, 9), round(box.height, 9)) for box in boxes} == {(10, 10)}


@pytest.mark.parametrize("box", [Box(0.0, 0.0, 0.0, 5.0), Box(0.0, 0.0, 0.0, 0.0)])
def test_a_flat_box_is_divided_all_the_same(box):
    assert len(squarify([3.0, 2.0, 1.0], box)) == 3
    assert squarify([], box) == []


def test_a_margin_leaves_no_negative_size():
    assert Box(0.0, 0.0, 1.0, 30.0).inner(2.0, 14.0) == Box(2.0, 16.0, 0.0, 12.0)


def test_modules_hold_the_bytes_of_the_report(report):
    root = tree(report, "planned")
    totals = report.totals()
    for name, nbytes in root.parts().items():
        assert nbytes == totals[name].planned
    assert set(root.children) == {"h", "a", '<i>&"été"'}
    assert root.children["h"].children["1"].children["mlp"].parts() == {
        "weights": 4 * 2**20,
        "gradients": 2 * 2**20,
        "saved activations": 3 * 2**18,
    }


def test_both_sides_are_at_one_scale():
    rows = [Row(name=f"{n}.w", kind="weight", plain=400, planned=100) for n in "ab"]
    report = Report(rows=tuple(rows), kept=(), unmatched=(), loss=True)
    outer = r'<rect x="0.0" y="0.0" width="([\d.]+)" height="([\d.]+)"'
    sizes = [re.search(outer, treemap(report, side)).groups() for side in ("plain", "planned")]
    assert sizes == [(f"{WIDTH}.0", f"{HEIGHT}.0"), (f"{WIDTH / 2}", f"{HEIGHT / 2}")]


def test_boxes_too_small_to_see_are_one():
    rows = [Row(name=f"h.{i}.{j}.w", kind="weight", plain=4, planned=4) for i in range(60)
            for j in range(200)]  # fmt: skip
    report = Report(rows=tuple(rows), kept=(), unmatched=(), loss=True)
    text = treemap(report, "plain")
    assert text.count("<rect") == 60 * 2 + 1  # h, its 60 modules, and in each one box for all
    assert text.count("weights 0.78 KiB") == 60 * 2

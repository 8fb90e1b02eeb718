"""Treemaps: areas in proportion, nothing outside, nothing on top of another."""

import re
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.audit.report import Report, Row
from memtrain.cli.render import charts
from memtrain.cli.render.charts import HEIGHT, WIDTH, treemap_svg

SIDES = st.floats(40.0, 1e4)


def drawn(rows, box):
    """Every box that a treemap draws: its path, its bytes by category, and where it is."""
    boxes = []

    def record(axis, box, path, parts, *, frame=False):
        boxes.append((path, dict(parts), box))

    with mock.patch.object(charts, "_box", record):
        charts._module(mock.Mock(), rows, box)
    return boxes


def of_rows(*rows):
    return Report(rows=rows, kept=(), unmatched=(), loss=True)


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=40), SIDES, SIDES)
def test_areas_are_in_proportion_and_apart(values, width, height):
    rows = [((str(index),), "weights", value) for index, value in enumerate(values)]
    _, *rest = drawn(rows, (3.0, 5.0, width, height))
    scale = (width - 2) * (height - 2) / sum(values)
    frames = {path: (parts["weights"], box) for path, parts, box in reversed(rest) if path}
    for index, (nbytes, (x, y, wide, high)) in enumerate(frames.values()):
        assert wide * high == pytest.approx(nbytes * scale, rel=1e-6)
        assert x >= 4 - 1e-6 * width
        assert y >= 6 - 1e-6 * height
        assert x + wide <= 2 + width * (1 + 1e-6)
        assert y + high <= 4 + height * (1 + 1e-6)
        for _, (left, top, w, h) in [*frames.values()][:index]:
            across, down = (
                min(x + wide, left + w) - max(x, left),
                min(y + high, top + h) - max(y, top),
            )
            assert min(across, down) < 1e-6 * max(width, height)
    # what is too small for a box of its own is in one with others
    told = sum(nbytes for nbytes, _ in frames.values())
    others = [parts["weights"] for path, parts, _ in rest if not path]
    assert told + sum(others) == sum(values)


def test_a_box_without_room_is_one_box():
    rows = [((name,), "weights", 8) for name in "ab"]
    for box in ((0.0, 0.0, 0.0, 5.0), (0.0, 0.0, 300.0, 4.0), (0.0, 0.0, 0.0, 0.0)):
        assert drawn(rows, box) == [("", {"weights": 16}, box)]


def test_modules_hold_the_bytes_of_the_report(report):
    text = treemap_svg(report, "planned")
    mlp = "h.1.mlp\nweights 4.00 MiB\ngradients 2.00 MiB\nsaved activations 0.75 MiB"
    for hint in (mlp.replace("0.75 MiB", "768.00 KiB"), "(root)\n"):
        assert f"<title>{hint}" in text


def test_both_sides_are_at_one_scale():
    report = of_rows(*(Row(name=f"{n}.w", kind="weight", plain=400, planned=100) for n in "ab"))
    outer = r'</title>\s*<path d="M ([\d.]+) ([\d.]+) \nL ([\d.]+) \S+ \nL \S+ ([\d.]+)'
    found = [re.search(outer, treemap_svg(report, side)).groups() for side in ("plain", "planned")]
    (left, bottom, right, top), (_, low, half, high) = [[float(x) for x in one] for one in found]
    assert (right - left, abs(top - bottom)) == (WIDTH, HEIGHT)
    assert (half, abs(high - low)) == (WIDTH / 2, HEIGHT / 2)


def test_boxes_too_small_to_see_are_one():
    rows = [Row(name=f"h.{i}.{j}.w", kind="weight", plain=4, planned=4) for i in range(60)
            for j in range(200)]  # fmt: skip
    text = treemap_svg(of_rows(*rows), "plain")
    assert text.count("<title>") == 60 * 2 + 1  # h, its 60 modules, and in each one box for all
    assert text.count("weights 0.78 KiB") == 60 * 2


def test_a_module_of_nothing_else_is_not_framed_twice():
    boxes = drawn([(("a", "b", "c"), "weights", 8)], (0.0, 0.0, 300.0, 200.0))
    assert [path for path, *_ in boxes] == ["a.b.c", "a.b.c"]


def test_an_empty_report_has_an_empty_picture():
    assert treemap_svg(of_rows(), "plain").startswith("<svg")
    assert charts.drawn_parts(of_rows()) == [*charts.CATEGORIES.values()]

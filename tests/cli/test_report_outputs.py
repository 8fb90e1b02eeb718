"""Tables and pictures of memtrain-report."""

import io
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from memtrain.audit.report import Report, Row
from memtrain.cli.render.charts import step_svg
from memtrain.cli.render.report_data import (
    GROUPINGS,
    ReportData,
    advice,
    limit_error,
    sum_rows,
    timelines,
)
from memtrain.cli.render.text_tables import show
from memtrain.cli.report.main import main
from memtrain.config.sizes import format_size


def printed(show, *arguments, **options):
    console = Console(width=80, file=io.StringIO(), color_system=None)
    show(console, *arguments, **options)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


@pytest.mark.parametrize("by", GROUPINGS)
def test_tables_are_those_on_file(by, report, settings, golden):
    golden(f"report_{by}.txt", printed(show, ReportData(report, settings), by=by, top=5))


@pytest.mark.parametrize("by", GROUPINGS)
def test_sums_are_those_of_the_report(by, report):
    sums = sum_rows(report, by)
    total = report.totals()["total"]
    assert sum(one.plain for _, one, _ in sums) == total.plain
    assert sum(one.planned for _, one, _ in sums) == total.planned
    assert sum(count for _, _, count in sums) == len(report.rows)
    plain = [one.plain for _, one, _ in sums]
    assert plain == sorted(plain, reverse=True)


def test_pictures_need_matplotlib_and_say_so_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("memtrain.cli.report.main.build", lambda request: pytest.fail("built"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["model=gpt2", "--svg", str(tmp_path / "a")]) == 2
    assert "--svg needs matplotlib: pip install 'memtrain[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_of_the_step_stands_alone(report, settings):
    svg = step_svg(report, settings)
    assert svg == step_svg(report, settings)
    root = ElementTree.fromstring(svg)  # namespaces are declared
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for side, line in timelines(report).items():
        peak = format_size(line.peak.nbytes)
        name = "PyTorch" if side == "plain" else "memtrain, exact"
        assert f"{name}: {peak} at the peak" in texts
    assert {"weights", "gradients", "saved activations", "forward", "backward"} <= {*texts}
    assert "prefers-color-scheme: dark" in svg
    assert all(colour in svg for colour in ("#4477aa", "#ee6677", "#ccbb44"))


def test_what_is_left_is_reported_with_what_would_shrink_it(report):
    assert [line.partition(":")[0] for line in advice(report)] == [
        "weights, 80%", "saved activations, 10%",
    ]  # fmt: skip
    rows = [Row(name=kind, kind=kind, plain=100, planned=planned)
            for kind, planned in (("weight", 75), ("gradient", 100), ("state", 100),
                                  ("activation", 20))]  # fmt: skip
    bare = Report(rows=tuple(rows), kept=(), unmatched=(), loss=True)
    assert [line.partition(",")[0] for line in advice(bare)] == ["gradients", "optimizer states"]
    assert list(advice(Report(rows=(), kept=(), unmatched=(), loss=True))) == []


def test_a_limit():
    row = Row(name="w", kind="weight", plain=4000, planned=2000)
    report = Report(rows=(row,), kept=(), unmatched=(), loss=True)
    assert limit_error(report, None) == limit_error(report, 2000) == ""
    assert limit_error(report, 1999) == "the planned total, 1.95 KiB, is over --fail-over 1.95 KiB"
    unknown = Report(rows=(row,), kept=(), unmatched=(), loss=True, unknown={"state": "no"})
    assert limit_error(unknown, 10**9) == "the limit cannot be checked: no"
    assert limit_error(unknown, None) == ""
    assert limit_error(Report(rows=(), kept=(), unmatched=(), loss=True), 0) == ""

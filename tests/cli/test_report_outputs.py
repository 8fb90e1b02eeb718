"""What memtrain-report writes: golden tables, JSON, CSV, pages and pictures."""

import csv
import io
import json
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from memtrain.audit.report import Report, Row
from memtrain.cli.render import data_files
from memtrain.cli.render.charts import step_svg
from memtrain.cli.render.data_files import COLUMNS, as_csv
from memtrain.cli.render.outcome import BY, Outcome, advice, broken_limits, grouped, timelines
from memtrain.cli.render.page import as_html
from memtrain.cli.render.text_tables import show
from memtrain.cli.report.diff import compare, show_changes
from memtrain.cli.report.main import main
from memtrain.config.sizes import format_size

VOID = {"meta"}


def printed(show, *arguments, **options):
    console = Console(width=80, file=io.StringIO(), color_system=None)
    show(console, *arguments, **options)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


@pytest.mark.parametrize("by", BY)
def test_tables_are_those_on_file(by, report, settings, golden):
    golden(f"report_{by}.txt", printed(show, Outcome(report, settings), by=by, top=5))


def test_a_depth_cuts_modules_paths(report, settings, golden):
    text = printed(show, Outcome(report, settings), by="module", depth=1)
    golden("report_module_depth_1.txt", text)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_sums_are_those_of_the_report(by, depth, report):
    sums = grouped(report, by, depth)
    total = report.totals()["total"]
    assert sum(one.plain for _, one, _ in sums) == total.plain
    assert sum(one.planned for _, one, _ in sums) == total.planned
    assert sum(count for _, _, count in sums) == len(report.rows)
    plain = [one.plain for _, one, _ in sums]
    assert plain == sorted(plain, reverse=True)


def test_csv_has_a_line_a_row(report):
    lines = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert tuple(lines[0]) == COLUMNS
    assert [line["name"] for line in lines] == [row.name for row in report.rows]
    assert [int(line["planned"]) for line in lines] == [row.planned for row in report.rows]
    assert lines[-1]["ratio"] == ""
    assert lines[8]["sites"].split(";") == list(report.rows[8].sites)
    assert lines[8]["module"] == "h.0.mlp.act"
    assert lines[0]["module"] == "h.0.attn"


class Page(HTMLParser):
    """Elements that are opened and closed, words, and what points elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.names, self.links = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_is_sound_and_stands_alone(report, settings):
    text = as_html(Outcome(report, settings))
    page = Page(text)
    assert page.open == []
    assert {link[0] for link in page.links} <= {"#"}  # parts of the same picture
    assert not {"script", "link", "img", "iframe"} & set(page.names)
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    assert page.names.count("svg") == 3  # bars, two timelines
    words = " ".join(page.words)
    assert '<i>&"été" / relu / input' in words  # escaped once, read back as it was
    assert "[bold]" in words
    for part in (
        "prefers-color-scheme: dark",
        "backward of h.1.mlp.act / gelu",
        "step",
        "model=sample",
        "seed=3",
        "no step",
        "op=[silu]",
    ):
        assert part in text


def test_a_page_of_nothing_is_sound():
    assert Page(as_html(Outcome(Report(rows=(), kept=(), unmatched=(), loss=False), {}))).open == []


def test_pictures_need_matplotlib_and_say_so_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("memtrain.cli.report.main.build", lambda request: pytest.fail("built"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for option in ("--html", "--svg"):
        assert main(["model=gpt2", option, str(tmp_path / "a")]) == 2
        error = capsys.readouterr().err
        assert f"{option} needs matplotlib: pip install 'memtrain[plot]'" in error
    assert list(tmp_path.iterdir()) == []


def test_the_same_report_gives_the_same_page(report, settings):
    assert as_html(Outcome(report, settings)) == as_html(Outcome(report, settings))


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


def test_json_is_read_back(report, settings, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(data_files.as_text(Outcome(report, settings)))
    content = data_files.read(path)
    assert content == json.loads(json.dumps(data_files.as_json(Outcome(report, settings))))
    assert [row["planned"] for row in content["rows"]] == [row.planned for row in report.rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ('{"schema": "memtrain-re', "is not JSON"),
        ("\x00\xff", "is not JSON"),
        ("[1]", "is not a report"),
        ('{"schema": "other"}', "is not a report"),
        ('{"schema": "memtrain-report", "version": 99}', "is of version 99; this memtrain"),
        ('{"schema": "memtrain-report"}', "is of version None"),
        ('{"schema": "memtrain-report", "version": 1}', "settings is not of type dict"),
        ('{"schema": "memtrain-report", "version": 1, "settings": {}, "categories": {}, '
         '"rows": [3], "kept": []}', r"rows\[0\] is not an object"),
        ('{"schema": "memtrain-report", "version": 1, "settings": {}, "categories": {}, '
         '"rows": [{"name": "a", "kind": "weight", "plain": "4"}], "kept": []}',
         r"rows\[0\].plain is not of type int"),
        ('{"schema": "memtrain-report", "version": 1, "settings": {}, "categories": '
         '{"total": {"plain": null}}, "rows": [], "kept": []}', "categories.total.plain is not"),
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        data_files.read(path)
    assert main(["--diff", str(path), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("memtrain-report: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def changed(report):
    """The report after a change: one layer's activation planned apart, a weight gone, one new."""
    rows = [row for row in report.rows if row.name not in ("h.1.mlp.weight", report.rows[8].name)]
    first, second = report.rows[8].sites
    rows += [
        Row(name=first, kind="activation", plain=2**20, planned=2**19, sites=(first,)),
        Row(name=second, kind="activation", plain=5 * 2**20, planned=0, sites=(second,)),
        Row(name="new", kind="weight", plain=10, planned=20, sites=("new",)),
    ]
    return Report(rows=tuple(rows), kept=(), unmatched=(), loss=True)


def test_differences_are_those_on_file(report, settings, golden):
    before = data_files.as_json(Outcome(report, settings))
    after = data_files.as_json(Outcome(changed(report), {**settings, "batch": 3, "overrides": []}))
    change = _, categories, sites = compare(before, after)
    assert sum(line.growth for line in sites) == categories[-1].growth
    assert {line.name for line in sites} == {
        "h.1.mlp.weight (weight)", "h.1.mlp.weight (gradient)", "new (weight)", report.rows[8].name,
    }  # fmt: skip
    golden("diff.txt", printed(show_changes, change, by="site"))
    golden("diff_pattern.txt", printed(show_changes, change, top=3))
    with pytest.raises(ValueError, match="--by op is not for --diff; allowed: pattern, site"):
        show_changes(Console(file=io.StringIO()), change, by="op")


def test_equal_reports_have_no_differences(report, settings, golden):
    same = data_files.as_json(Outcome(report, settings))
    change = compare(same, same)
    settings_changed, categories, sites = change
    assert settings_changed == sites == []
    assert categories[-1].growth == 0
    golden("diff_equal.txt", printed(show_changes, change))


def test_what_is_left_is_told_with_what_would_shrink_it(report):
    assert [line.partition(":")[0] for line in advice(report)] == [
        "weights, 80%", "saved activations, 10%",
    ]  # fmt: skip
    rows = [Row(name=kind, kind=kind, plain=100, planned=planned)
            for kind, planned in (("weight", 75), ("gradient", 100), ("state", 100),
                                  ("activation", 20))]  # fmt: skip
    bare = Report(rows=tuple(rows), kept=(), unmatched=(), loss=True)
    assert [line.partition(",")[0] for line in advice(bare)] == ["gradients", "optimizer states"]
    assert list(advice(Report(rows=(), kept=(), unmatched=(), loss=True))) == []


def test_limits():
    row = Row(name="w", kind="weight", plain=4000, planned=2000)
    report = Report(rows=(row,), kept=(), unmatched=(), loss=True)
    assert broken_limits(report, None, None) == broken_limits(report, 2000, 2.0) == []
    assert broken_limits(report, 1999, None) == [
        "the planned total, 1.95 KiB, is over --fail-over 1.95 KiB"
    ]
    assert (
        "2.000 times the planned total, under --fail-under 2.01"
        in broken_limits(report, None, 2.01)[0]
    )
    unknown = Report(rows=(row,), kept=(), unmatched=(), loss=True, unknown={"state": "no"})
    assert broken_limits(unknown, 10**9, None) == ["the limits cannot be checked: no"]
    assert broken_limits(unknown, None, None) == []
    nothing = Report(rows=(), kept=(), unmatched=(), loss=True)
    assert broken_limits(nothing, 0, 9.0) == []


def test_a_growth_over_the_limit_is_exit_status_3(report, settings, tmp_path, capsys):
    one, other = tmp_path / "1.json", tmp_path / "2.json"
    one.write_text(data_files.as_text(Outcome(changed(report), settings)))
    other.write_text(data_files.as_text(Outcome(report, settings)))
    growth = compare(data_files.read(one), data_files.read(other))[1][-1].growth
    assert growth > 0
    diff = ["--diff", str(one), str(other), "--fail-over"]
    assert main([*diff, str(growth)]) == 0
    capsys.readouterr()
    assert main([*diff, str(growth - 1)]) == 3
    captured = capsys.readouterr()
    assert "grew by" in captured.err
    assert "planned bytes by category" in captured.out
    assert main(["--diff", str(other), str(one), "--fail-over", "0"]) == 0  # it shrank


def test_diff_takes_nothing_else(tmp_path, capsys):
    assert main(["model=gpt2", "--diff", "a", "b"]) == 2
    assert "'model=gpt2' is not for it" in capsys.readouterr().err
    assert main(["--diff", "nowhere.json", "b"]) == 2
    assert "nowhere.json" in capsys.readouterr().err

"""memtrain-report at the end of a pipe, without colour, without UTF-8, without permission."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from memtrain.cli.command_line import check_writable, consoles, working
from memtrain.cli.render.report_data import ReportData
from memtrain.cli.render.text_tables import show
from memtrain.cli.report.main import main
from memtrain.plan.file import write_file

COLOUR = re.compile(rb"\x1b\[(\d+;)*[39][0-7]m")  # bold and italics are none
MAIN = "import sys; from memtrain.cli.report.main import main; sys.exit(main())"
RUN = [sys.executable, "-c", MAIN]


def test_a_reader_that_stops_ends_it_quietly():
    # The reader has gone before the first line is written.
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*RUN, "--help"], check=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


class Closed(io.TextIOWrapper):
    """An output whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize(("limit", "status"), [("100GiB", 0), ("1B", 3)])
def test_a_limit_counts_although_nobody_reads(limit, status, builder, monkeypatch, capsys):
    monkeypatch.setattr("memtrain.cli.report.main.discard_output", lambda: None)
    monkeypatch.setattr(sys, "stdout", Closed(io.BytesIO()))
    assert main(["model=py:theirs:build", "--no-peak", "--fail-over", limit]) == status


def test_what_the_encoding_lacks_is_escaped(report, monkeypatch):
    bytes_ = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_, encoding="ascii"))
    monkeypatch.setenv("COLUMNS", "80")
    show(consoles()[0], ReportData(report, {"model": "né"}))
    sys.stdout.flush()
    assert b"model=n\\xe9" in bytes_.getvalue()


@pytest.mark.parametrize(
    "environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"TERM": "dumb", "FORCE_COLOR": "0"}]
)
def test_no_colour_means_no_escape_codes(environment, report, monkeypatch):
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    output.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", output)
    show(consoles()[0], ReportData(report, {"model": "small"}))
    output.flush()
    text = output.buffer.getvalue()
    assert b"bytes by category" in text
    assert not COLOUR.search(text)
    assert COLOUR.search(_coloured(monkeypatch))


def _coloured(monkeypatch):
    """The control: the same environment with colour has escape codes."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    sys.stdout.seek(0)
    console, _ = consoles()
    console.print("batch=8")
    sys.stdout.flush()
    return sys.stdout.buffer.getvalue()


def test_progress_is_shown_on_a_terminal_only():
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with working(console, "adding [numbers]"):
            pass
        assert ("adding [numbers]" in console.file.getvalue()) is terminal


def test_a_spinner_of_ascii_where_there_is_no_utf8():
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with working(Console(file=output, force_terminal=True, width=80), "adding"):
        pass
    output.flush()
    assert b"adding" in output.buffer.getvalue()


def test_where_one_may_not_write_nothing_is_left(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "closed"
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for option in ("--json", "--svg", "--plan"):
        assert main(["model=gpt2", option, str(folder / "a")]) == 2
        assert f"cannot write {option}" in (error := capsys.readouterr().err)
        assert "no permission" in error
    assert list(folder.iterdir()) == []
    assert main(["model=gpt2", "--json", str(folder)]) == 2
    assert "a folder" in capsys.readouterr().err


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")
    check_writable(path, "--json")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError, match=r"cannot write .* No space left"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_dash_is_the_standard_output(builder, capsys):
    assert main(["model=py:theirs:build", "--no-peak", "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["settings"]["model"] == "py:theirs:build"
    assert main(["model=py:theirs:build", "--json", "-", "verify=true"]) == 2
    assert "- takes the standard output alone" in capsys.readouterr().err


def test_an_interrupted_run_says_so(monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("memtrain.cli.report.main.build", interrupt)
    assert main(["model=gpt2"]) == 130
    assert capsys.readouterr().err == "memtrain-report: interrupted\n"

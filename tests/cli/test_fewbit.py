"""memtrain-fewbit: its tables, and one clear line for every mistake."""

import io
import sys

import pytest

from memtrain.cli.fewbit import main
from memtrain.compressors.fewbit.functions import FAMILIES
from memtrain.compressors.fewbit.solver import solve, table


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_gelu_prints_its_table_within_80_columns(capsys):
    assert main(["gelu", "--bits", "3"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "gelu: 3 bits, plain" in text
    assert "squared error on [-10, 10], weight uniform: 0.0118983" in text
    rows = [line.split() for line in text.splitlines()[4:]]
    assert rows[0] == ["0", "-inf", "-2.398078", "-0.0025996"]
    assert rows[4] == ["4", "0", "0.326316", "0.6279073"]
    assert len(rows) == 8


def test_bands_and_even_tables_print_as_they_are(capsys):
    assert main(["relu6"]) == 0
    text = capsys.readouterr().out
    assert "relu6: 1 bit, band" in text
    assert "0: the steps are the derivative" in text
    assert len(text.splitlines()) == 7
    assert main(["tanh", "--bits", "1"]) == 0
    assert "|x| above" in capsys.readouterr().out


def test_an_interval_and_a_weight_reach_the_solver(capsys):
    arguments = ["silu", "--bits", "2", "--interval", "-6", "6.5", "--weight", "normal"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "on [-6, 6.5], weight normal" in text
    levels = solve("silu", 2, (-6, 6.5), "normal").levels
    assert all(f"{level:.7f}" in text for level in levels)


def test_parameters_go_to_the_function(capsys):
    assert main(["elu", "--alpha", "5", "--bits", "2"]) == 0
    text = capsys.readouterr().out
    assert "elu alpha=5: 2 bits" in text
    assert all(f"{level:.7f}" in text for level in table("elu", 2, (5.0,)).levels)
    assert main(["softplus", "--threshold", "3"]) == 0
    assert "softplus beta=1 threshold=3: 3 bits" in capsys.readouterr().out
    assert main(["hardtanh", "--min-val", "-2"]) == 0
    assert "hardtanh min_val=-2 max_val=1" in capsys.readouterr().out


def test_errors_are_the_papers(capsys):
    assert main(["--errors"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["gelu"] == ["0.1410", "0.0406", "0.0119", "0.0031"]
    assert "exact with 1 bit: relu, leaky_relu" in text
    assert rows["softplus"] == ["0.2902", "0.0541", "0.0121", "0.0029"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_names_every_function_within_80_columns(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in FAMILIES)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gelo"], "did you mean 'gelu'"),
        (["gelu", "--bits", "9"], "bits 9 is out of range; allowed: 1 to 8"),
        (["gelu", "--bits", "two"], "--bits"),
        (["gelu", "--interval", "3", "1"], "(3.0, 1.0)"),
        (["gelu", "--interval", "3"], "--interval"),
        (["gelu", "--weight", "gauss"], "gauss"),
        (["gelu", "--alpha", "1"], "gelu has no parameter 'alpha'; it has: none"),
        (["elu", "--beta", "1"], "it has: alpha"),
        (["celu", "--alpha", "-1"], "alpha > 0"),
        (["threshold"], "threshold needs --threshold and --value"),
        (["gelu", "--bitz", "3"], "--bitz"),
        (["--bits", "3"], "no function given"),
    ],
)
def test_mistakes_take_one_line(arguments, word, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memtrain-fewbit: ")
    assert word in err
    assert err.count("\n") == 1


class Closed(io.TextIOWrapper):
    """An output whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError


def test_a_pipe_may_close_early(monkeypatch):
    dropped = []
    monkeypatch.setattr("memtrain.cli.fewbit.discard_output", lambda: dropped.append(True))
    monkeypatch.setattr(sys, "stdout", Closed(io.BytesIO()))
    assert main(["gelu", "--bits", "3"]) == 0
    assert dropped == [True]

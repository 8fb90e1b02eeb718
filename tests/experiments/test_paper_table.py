"""The few-bit paper's table of activation memory."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from experiments import paper_table
from experiments.paper_table import PAPER, Ours, main, measured, table

QUICK = ("VGG 16", "ResNet-18", "GPT2", "RoBERTa-base")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.nightly) for n in PAPER],
)
def test_ours_is_within_five_percent_of_the_published_numbers(name):
    pytest.importorskip("transformers")
    ours, paper = measured(name), PAPER[name]
    # The paper does not say how it counts: these margins are what a differing detail leaves.
    assert ours.everything == pytest.approx(paper.openreview[0], rel=0.05)
    assert ours.nonlinear == pytest.approx(paper.openreview[1], rel=0.055)
    assert ours.size == pytest.approx(paper.size, rel=0.04)


def test_vgg_is_as_counted_by_hand():
    # 256x256x64, 128x128x128, twice 64x64x256 and 32x32x512, twice 16x16x512, twice 4096 floats
    nonlinear = 4 * (2**22 + 2**21 + 2 * 2**20 + 2 * 2**19 + 2 * 2**17 + 2 * 4096)
    ours = measured("VGG 11")
    assert ours.nonlinear == nonlinear / 2**20
    # outputs of nonlinearities and pools that convolutions keep, and the pools' indices, int64
    pools = [2**20, 2**19, 2**18, 2**17, 2**15]
    kept = [4 * 2**22, 4 * 2**21, 8 * 2**20, 8 * 2**19, 8 * 2**17]
    flat = 4 * (25088 + 2 * 4096)
    image = 4 * 3 * 2**16
    extra = sum(kept) + sum(12 * n for n in pools) + flat + image
    assert ours.everything * 2**20 == nonlinear + extra


def test_the_table_fits_80_columns():
    rows = [(name, Ours(*(x * 0.99 for x in (paper.size, *paper.openreview))))
            for name, paper in PAPER.items()]  # fmt: skip
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(table(rows))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    assert text == (Path(__file__).parent / "golden/paper_table.txt").read_text(encoding="utf-8")


def test_the_command_prints_every_row(monkeypatch, capsys):
    monkeypatch.setattr(paper_table, "measured", lambda name: Ours(1.0, 2.0, 3.0))
    main()
    text = capsys.readouterr().out
    assert [name for name in PAPER if f"\n{name} " not in text] == []

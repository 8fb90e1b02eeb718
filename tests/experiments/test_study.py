"""A study's files: a line for each run, and each step's loss where it is asked for."""

import pytest

from experiments.curves_plot import smoothed
from experiments.optimizer_states import STUDY
from experiments.study import KEY, LOSSES, read


def test_curves_are_kept_of_what_is_trained(tmp_path, capsys):
    output, curves = tmp_path / "runs.csv", tmp_path / "deep" / "curves.csv"
    call = ["tasks=digits", "variants=fp32,8bit", "seeds=0", "steps=2"]
    assert STUDY.main([*call, f"output={output}", f"curves={curves}"]) == 0
    runs, lines = read(output), read(curves)
    assert tuple(lines[0]) == (*KEY, LOSSES)
    assert tuple(runs[0]) == STUDY.columns
    for run, line in zip(runs, lines, strict=True):
        losses = [float(loss) for loss in line[LOSSES].split()]
        assert len(losses) == 2
        assert losses[-1] == pytest.approx(float(run["train_loss"]), rel=1e-4)
        assert [run[name] for name in KEY] == [line[name] for name in KEY]
    assert STUDY.main([*call, f"output={output}", f"curves={curves}"]) == 0  # nothing is left
    assert read(curves) == lines
    pytest.importorskip("matplotlib")
    assert STUDY.main(["--plot", "tasks=digits", f"curves={curves}"]) == 0
    assert curves.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_several_lengths_are_lines_of_their_own(tmp_path):
    output = tmp_path / "runs.csv"
    call = ["tasks=digits", "variants=fp32", "seeds=0", "steps=1,2", f"output={output}"]
    assert STUDY.main(call) == 0
    assert [row["steps"] for row in read(output)] == ["1", "2"]


def test_a_mean_is_told_at_the_step_that_completes_it():
    assert smoothed([1.0, 2.0, 6.0], 1) == [1.0, 2.0, 6.0]
    assert smoothed([1.0, 2.0, 6.0], 3) == [3.0]

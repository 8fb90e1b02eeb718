"""The study of optimizer states: each variant is what its name says, and a file goes on."""

import csv

from experiments.optimizer_states import STUDY, VARIANTS, train


def test_a_file_goes_on_where_it_stopped(tmp_path, capsys):
    output = tmp_path / "deep" / "states.csv"
    given = ["tasks=digits", "steps=2", f"output={output}", "seeds=0"]
    assert STUDY.main([*given, "variants=fp32"]) == 0
    assert STUDY.main([*given, "variants=fp32,factored_2bit"]) == 0
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert tuple(rows[0]) == STUDY.columns
    assert [row["variant"] for row in rows] == ["fp32", "factored_2bit"]
    assert float(rows[0]["bytes_per_parameter"]) > 8 > 1 > float(rows[1]["bytes_per_parameter"])
    capsys.readouterr()
    assert STUDY.main(["--table", f"output={output}"]) == 0
    assert "| digits, 2 steps | 0.001 | factored_2bit |" in capsys.readouterr().out
    assert STUDY.main(["seeds=0", "variant=fp32"]) == 2


def test_intervals_are_of_differences_by_seed():
    rows = [
        {"task": "digits", "lr": "1", "steps": "2", "variant": variant, "seed": str(seed)}
        | {"validation_loss": str(loss + seed), "accuracy": "1", "bytes_per_parameter": "8"}
        for variant, loss in (("fp32", 1.0), ("8bit", 1.5))
        for seed in range(3)
    ]
    assert "| 3 | 2.5000 | 1.0000 | 8.00 | +0.5000 +- 0.0000 |" in STUDY.table(rows)[-1]


def test_variants_hold_what_their_names_say():
    found = {name: train("digits", name, 0, 1e-3, 1) for name in ("lion", "factored_exact_moment")}
    assert 4 <= found["lion"]["bytes_per_parameter"] < 4.01
    assert 4 <= found["factored_exact_moment"]["bytes_per_parameter"] < 4.2
    assert set(VARIANTS) >= {"8bit", "rank1_4bit", "factored_4bit", "factored_2bit", "lion_4bit"}

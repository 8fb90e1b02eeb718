"""The harness at toy sizes: that it measures what it says, never how fast."""

import csv
import importlib
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MEASURED = {
    "elements", "rounds", "ns_per_element", "bytes_moved", "percent_of_copy", "ours_peak_bytes",
    "theirs_peak_bytes", *(f"{what}_p{percent}" for what in ("ours_ms", "theirs_ms", "copy_ms",
                                                             "ratio") for percent in (10, 50, 90)),
}  # fmt: skip
WHERE = {"device", "threads", "clock", "memtrain", "torch", "triton", "python", "load", "date"}


@pytest.fixture
def command(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.__main__")


@pytest.fixture
def harness(command):
    return importlib.import_module("benchmarks.harness")


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fake(harness, command, monkeypatch, *trials):
    """Put a benchmark `fake` of these trials into the registry."""

    def jobs(options):
        return [
            harness.timed(f"case {index}", {"case": index}, lambda trial=trial: trial, options)
            for index, trial in enumerate(trials)
        ]

    benchmark = harness.Benchmark("fake", "a fake", jobs, ("case", "ratio_p50"))
    monkeypatch.setitem(command.BENCHMARKS, "fake", benchmark)


def trial(harness, ours=lambda: None, theirs=lambda: None, gate=lambda: None, **fields):
    return harness.Trial(ours, theirs, gate, elements=fields.pop("elements", 10), **fields)


def test_list_names_every_benchmark(command, capsys):
    assert command.main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in ("activations", "optimizer", "peaks"):
        assert name in shown


def test_settings_are_the_defaults_and_what_is_set(harness):
    options = harness.Options(overrides=("layers=3", "presets=balanced,smallest"))
    chosen = options.settings(layers="12", width="64", presets="balanced")
    assert chosen == {"layers": "3", "width": "64", "presets": "balanced,smallest"}
    with pytest.raises(ValueError, match="'layers'; allowed: presets"):
        options.settings(presets="balanced")


def test_activations_are_those_that_are_set(harness):
    jobs = importlib.import_module("benchmarks.activations").jobs
    options = harness.Options(overrides=("ops=gelu:3,relu", "powers=10,14"))
    names = [f"{op} {dtype} ({n},)" for dtype in ("float32", "bfloat16") for n in (1024, 16384)
             for op in ("gelu fwd+bwd 3", "relu fwd+bwd 1")]  # fmt: skip
    assert [job.title for job in jobs(options)] == names


def test_activations_quick(command, monkeypatch, tmp_path, capsys):
    module = importlib.import_module("benchmarks.activations")
    monkeypatch.setattr(module, "sizes", lambda options: [1 << 10])
    assert command.main(["run", "activations", "--quick", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "activations.csv")
    columns = {"op", "baseline", "bits", "shape", "dtype", "saved_bytes"}
    assert set(rows[0]) == columns | MEASURED | WHERE
    ops = {(row["op"], row["bits"], row["dtype"]) for row in rows}
    for dtype in ("float32", "bfloat16"):
        for bits in "1234":
            assert ("gelu fwd+bwd", bits, dtype) in ops
            assert ("silu fwd+bwd", bits, dtype) in ops
        assert {("relu fwd+bwd", "1", dtype), ("dropout fwd+bwd", "1", dtype)} <= ops
        assert {("group compress", "2", dtype), ("group decompress", "4", dtype)} <= ops
        assert ("derivative compress", "3", dtype) in ops
    assert ("integers decompress", "", "bool") in ops
    for row in rows:
        assert float(row["ours_ms_p10"]) <= float(row["ours_ms_p50"]) <= float(row["ours_ms_p90"])
        assert row["rounds"] == "2"
        assert row["torch"] == torch.__version__
    (relu,) = (r for r in rows if (r["op"], r["dtype"]) == ("relu fwd+bwd", "float32"))
    # x, y, dy and dx of 4 bytes, and a bit written and read; what is kept is the bit, in 256s.
    assert (relu["bytes_moved"], relu["saved_bytes"]) == (str(1024 * 16 + 256), "128")
    assert "relu fwd+bwd" in capsys.readouterr().out


def test_optimizer_quick(command, tmp_path):
    arguments = ["run", "optimizer", "--quick", "--set", "only=AdamW4bit,"]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "optimizer.csv")
    names = ["AdamW4bit, B128 both", "AdamW4bit, rank-1", "AdamW4bit, 2-bit first"]
    assert [row["optimizer"] for row in rows] == names
    assert set(rows[0]) >= MEASURED | WHERE


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "count"), [("architectures", 2), ("host", 4)])
def test_the_others_quick(command, tmp_path, name, count):
    assert command.main(["run", name, "--quick", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / f"{name}.csv")
    assert len(rows) == count
    assert set(rows[0]) >= WHERE


def test_a_failing_gate_fails_the_command(harness, command, monkeypatch, tmp_path, capsys):
    timed = []

    def gate():
        harness.require(torch.tensor(False), "two is not three")

    wrong = trial(harness, ours=lambda: timed.append(1), gate=gate)
    fake(harness, command, monkeypatch, wrong, trial(harness))
    assert command.main(["run", "fake", "--quick", "--out", str(tmp_path)]) == 1
    assert timed == []
    assert [row["case"] for row in read(tmp_path / "fake.csv")] == ["1"]
    assert "GATE FAILED, not timed: fake: case 0: two is not three" in capsys.readouterr().out


def test_an_error_is_no_gate(harness, command, monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("out of paper")

    fake(harness, command, monkeypatch, trial(harness, ours=broken))
    with pytest.raises(RuntimeError, match="out of paper"):
        command.main(["run", "fake", "--quick", "--out", str(tmp_path)])


def test_sides_take_turns_and_ratios_are_of_rounds(harness, monkeypatch):
    order, clock = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def side(name, costs):
        costs = iter(costs)

        def call():
            order.append(name)
            clock[0] += next(costs, 9.0)

        return call

    # Two warm-up calls each; the third round is slow for both, as when something else runs.
    ours, theirs = side("a", [1, 1, 2, 3, 40]), side("b", [1, 1, 4, 4, 80])
    row = harness.measure(trial(harness, ours, theirs), harness.Options(rounds=3))
    assert order[:10] == [*"aabb", *"ababab"]
    assert (row["ratio_p50"], row["ours_ms_p50"], row["theirs_ms_p50"]) == (0.5, 3000, 4000)
    assert row["ratio_p90"] == pytest.approx(0.75 - 0.2 * 0.25)
    assert row["ns_per_element"] == pytest.approx(3e9 / 10)


def test_the_cpu_clock_does_not_count_waiting(harness):
    def wait():
        time.sleep(0.05)

    assert harness.seconds(wait, 1, "cpu") >= 0.05
    assert harness.seconds(wait, 1, "cpu", "cpu") < 0.025


def test_bandwidth_is_against_a_copy_of_the_same_size(harness, monkeypatch):
    sampled = {1: 4.0, 2: 1.0}  # seconds: ours, then the copy
    calls = []

    def seconds(call, repeats, device, clock="wall"):
        calls.append(call)
        return sampled[1 if call is ours else 2]

    def ours():
        return None

    monkeypatch.setattr(harness, "seconds", seconds)
    fields = {"nbytes": 1000, "copied": 500}
    row = harness.measure(trial(harness, ours, None, **fields), harness.Options(rounds=2))
    # 1000 bytes in 4 s; the copy reads and writes 500 in 1 s.
    assert row["percent_of_copy"] == pytest.approx(25)
    assert row["ratio_p50"] == ""


def test_short_calls_are_repeated(harness, monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call():
        calls.append(1)
        clock[0] += 1e-5

    options = harness.Options()
    assert harness.calibrate(call, options) == 200  # 2 ms
    assert harness.seconds(call, 200, "cpu") == pytest.approx(1e-5)
    assert len(calls) == 202


def test_peak_counts_what_a_call_holds_at_once(harness):
    def call():
        first = torch.ones(1000)
        second = first + 1
        del first
        return second * 2

    assert harness.peak(call, "cpu") == 8000


def test_rows_are_added_to_rows_of_other_columns(harness, tmp_path):
    path = tmp_path / "deep" / "x.csv"
    harness.append(path, [{"a": 1, "b": 0.123456789}])
    harness.append(path, [{"a": 2, "c": "x"}])
    assert read(path) == [{"a": "1", "b": "0.12346", "c": ""}, {"a": "2", "b": "", "c": "x"}]
    assert [file.name for file in path.parent.iterdir()] == ["x.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing"], "unknown benchmark 'nothing'; allowed: activations"),
        (["run", "--rounds", "0"], "--rounds 0; allowed: 1 or more"),
        (["run", "--device", "cuda"], "there is no CUDA device here"),
    ],
)
def test_wrong_arguments_are_named(command, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as failure:
        command.main(arguments)
    assert failure.value.code == 2
    assert message in capsys.readouterr().err

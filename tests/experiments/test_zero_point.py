"""The histograms of second moments: what they count, and that a file of them is drawn."""

import pytest

from experiments import states_ablation, zero_point


def test_codes_with_zero_have_a_peak_at_a_million():
    top = {}
    for row in ("fp32", "b128_de", "b128_de0"):
        _, held = states_ablation.second_moments("digits", row, 0, 1e-3, 5)
        shares = zero_point.histogram(held)
        assert sum(shares.values()) == pytest.approx(1)
        top[row] = shares.get(6 * zero_point.BINS, 0)
    assert top["b128_de"] > 0.02
    assert top["b128_de"] == pytest.approx(states_ablation.zeroed("digits", "b128_de", 0, 1e-3, 5))
    assert top["fp32"] == top["b128_de0"] == 0


def test_a_file_is_written_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(zero_point, "RUNS", (("digits", 0, 1e-3, 2),))
    output = f"output={tmp_path / 'deep' / 'zero.csv'}"
    assert zero_point.main([output]) == zero_point.main(["--plot", output]) == 0
    drawn = (tmp_path / "deep" / "zero.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert zero_point.main(["outptu=x"]) == 2

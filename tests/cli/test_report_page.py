"""The page of memtrain-report --html in a real browser, where one is installed."""

import shutil
import subprocess

import pytest

from memtrain.cli.render.charts import COLOURS
from memtrain.cli.render.outcome import Outcome
from memtrain.cli.render.page import as_html

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_browser_draws_the_page(report, settings, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    page, shot = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(as_html(Outcome(report, settings)), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2400",
               f"--user-data-dir={tmp_path}", f"--screenshot={shot}", page.as_uri()]  # fmt: skip
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    found = {tuple(pixel) for pixel in pixels[::7].tolist()}
    for part in ("weights", "gradients", "saved activations", "temporaries"):
        assert tuple(int(COLOURS[part][i : i + 2], 16) for i in (1, 3, 5)) in found

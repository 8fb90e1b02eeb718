"""Links in the Markdown files lead somewhere, and the paths that they name exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:memtrain|tests|benchmarks|experiments|docs)/[\w./]*\w)`")


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_are_named_exist(page):
    if page.name == "CHANGELOG.md":  # it tells of files that went
        return
    text = page.read_text()
    added = set(re.findall(r"(?m)^\+\+\+ b/(\S+)$", text))  # by a diff on the page
    missing = [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    assert set(missing) - added == set()


def test_the_reference_is_made_of_docstrings(tmp_path):
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    public = re.search(r"(?m)^PUBLIC := (.*)$", makefile)[1].split()
    command = [sys.executable, "-m", "pdoc", "-d", "google", "-o", str(tmp_path), *public]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {name: tmp_path / f"{name.replace('.', '/')}.html" for name in public}
    assert [name for name, page in pages.items() if not page.exists()] == []
    assert "AdamW4bit" in pages["memtrain.optim"].read_text()

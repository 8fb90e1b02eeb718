"""Links in the Markdown files lead somewhere, and the paths that they name exist."""

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
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
    if page.name == "CHANGELOG.md":  # it names files that were removed
        return
    text = page.read_text()
    added = set(re.findall(r"(?m)^\+\+\+ b/(\S+)$", text))  # by a diff on the page
    missing = [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    assert set(missing) - added == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page):
    named = re.findall(r"`(tests/[\w./]+\.py)::(\w+)`", page.read_text())
    missing = [each for each in named if f"def {each[1]}(" not in (ROOT / each[0]).read_text()]
    assert missing == []


def test_benchmarks_that_are_named_exist():
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"benchmarks run (\w+)", text))
    assert named
    assert named <= {*import_module("benchmarks.__main__").BENCHMARKS}


def test_the_known_ops_are_those_of_the_code(monkeypatch):
    """`python docs/make_known_ops.py` writes the page."""
    pytest.importorskip("memtrain.activations.saved.known_ops")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    assert import_module("make_known_ops").page() == (ROOT / "docs/known_ops.md").read_text()


@pytest.mark.parametrize(
    ("pages", "most"),
    [
        ("README.md", 900),
        ("CONTRIBUTING.md", 1_500),
        ("CHANGELOG.md", 1_200),
        ("docs/guides/*.md", 1_500),
    ],
)
def test_a_page_is_short(pages, most):
    """Limits of words; a commit may raise one and say why."""
    words = {page.name: len(page.read_text().split()) for page in ROOT.glob(pages)}
    assert {name: n for name, n in words.items() if n > most} == {}


def test_the_documentation_is_short():
    assert sum(len(page.read_text().split()) for page in PAGES) <= 28_000


@pytest.mark.skipif(find_spec("sphinx") is None, reason="the extra `docs` is not installed")
def test_the_site_is_built_without_a_warning(tmp_path):
    """Pages, their links and anchors, and every public name with its docstring."""
    makefile = (ROOT / "Makefile").read_text()
    options = re.search(r"-m (sphinx .*) -d build/doctrees \. build/site", makefile)[1].split()
    command = [sys.executable, "-m", *options, "-d", tmp_path / "trees", ".", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "docs/reference.html").read_text()
    reference = (ROOT / "docs/reference.md").read_text()
    modules = ["memtrain", *re.findall(r"automodule:: (\S+)", reference)]
    for module in map(import_module, modules):
        for name in {*getattr(module, "__all__", [])}:
            if callable(getattr(module, name)):
                home = "memtrain.config" if name == "Config" else module.__name__
                assert f'id="{home}.{name}"' in html

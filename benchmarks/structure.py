"""Print figures of the code's structure, and fail above their limits.

    python -m benchmarks.structure                   figures, limits and the largest files
    python -m benchmarks.structure --check           only what is above a limit; exit status 1 then
    python -m benchmarks.structure --words FOLDER    private words of a folder, by file and line

Nothing is imported from memtrain: the figures are read from the files. A limit in `LIMITS` may be
raised by a commit of its own that gives the reason; `GOALS` is what the limits come down to.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
SOURCES = (".py", ".cpp", ".h", ".yaml")
LONGEST = 450
"""Lines of a file."""

LIMITS = {
    "lines of the package": 41_160,
    "lines of the tests": 40_110,
    "lines of experiments and benchmarks": 4_500,
    "classes": 190,
    f"files above {LONGEST} lines": 0,
    "private words": 0,
    "private words in identifiers": 0,
    "words of the documentation": 28_000,
    "words of CHANGELOG.md": 600,
    "words of CONTRIBUTING.md": 1_500,
}
"""Figure -> the most that CI allows."""
GOALS = {
    "lines of the package": 38_000,
    "lines of the tests": 40_000,
    "lines of experiments and benchmarks": 4_500,
    "classes": 190,
    f"files above {LONGEST} lines": 0,
    "private words": 0,
    "private words in identifiers": 0,
    "words of the documentation": 28_000,
    "words of CHANGELOG.md": 600,
    "words of CONTRIBUTING.md": 1_500,
}
"""Figure -> the aim."""

PRIVATE = re.compile(
    "settles?|settled|settling|surprised|look_of|witness(es)?|step_aside|step_back|stepped_aside|"
    "kinks?|strangers?|needless|alike|mend(s|ed|ing)?|tells?|told|telling|seats?|foretells?|"
    "foretold|carrier|leads_to|dropping|running_again|shell|leaving|apart",
    re.IGNORECASE,
)
"""Words that readers from outside had to guess, matched as whole words."""
_MORE = "foreign|own|given|held|look|turns?|mine|theirs|asked|again|beneath"
_NAMES = re.compile(f"{PRIVATE.pattern}|{_MORE}", re.IGNORECASE)
"""Words that no identifier of the package may have."""
_PRIVATE = re.compile(rf"\b({PRIVATE.pattern})\b", re.IGNORECASE)
_PARTS = re.compile(r"[A-Za-z]+")


def files(*folders: str, suffixes: Sequence[str] = SOURCES) -> Iterator[Path]:
    """Yield the source files below folders of the repository."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def length(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def prose(path: Path) -> list[tuple[int, str]]:
    """Return the comments and string literals of a Python file, by line.

    Other files are returned whole: they have comments and little else to read.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    return [
        (token.start[0] + offset, line)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in kinds
        for offset, line in enumerate(token.string.splitlines())
    ]


def private_words(path: Path) -> list[tuple[int, str]]:
    """Return the private words in the comments, docstrings and messages of a file, by line."""
    return [(line, match[0]) for line, text in prose(path) for match in _PRIVATE.finditer(text)]


def private_names(path: Path) -> list[tuple[int, str]]:
    """Return the identifiers of a Python file that contain a private word, where they are bound."""
    private = _NAMES if (ROOT / "memtrain") in path.parents else PRIVATE
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(node, "name", None) or getattr(node, "arg", None)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if not isinstance(name, str):
            continue
        parts = _PARTS.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
        if any(private.fullmatch(part) for part in (name.strip("_"), *parts)):
            found.append((getattr(node, "lineno", 0), name))
    return found


def words(*paths: Path) -> int:
    """Return the number of words of text files, without code blocks."""
    blocks = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
    return sum(len(blocks.sub("", path.read_text(encoding="utf-8")).split()) for path in paths)


def figures() -> dict[str, int]:
    """Return every figure of `LIMITS`."""
    package = list(files("memtrain"))
    modules = [path for path in package if path.suffix == ".py"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules]
    every = [*package, *files("tests", "experiments", "benchmarks")]
    lists = [Path(__file__), ROOT / "tests" / "test_structure.py"]  # which name the words
    read = [path for path in [*every, *files("examples")] if path not in lists]
    pages = [*files("docs", suffixes=(".md",)), *(ROOT / "benchmarks").glob("*.md")]
    return {
        "lines of the package": sum(map(length, package)),
        "lines of the tests": sum(map(length, files("tests"))),
        "lines of experiments and benchmarks": sum(map(length, files("experiments", "benchmarks"))),
        "classes": sum(isinstance(n, ast.ClassDef) for tree in trees for n in ast.walk(tree)),
        f"files above {LONGEST} lines": sum(length(path) > LONGEST for path in every),
        "private words": sum(len(private_words(path)) for path in read),
        "private words in identifiers": sum(
            len(private_names(path)) for path in read if path.suffix == ".py"
        ),
        "words of the documentation": words(ROOT / "README.md", *pages),
        "words of CHANGELOG.md": words(ROOT / "CHANGELOG.md"),
        "words of CONTRIBUTING.md": words(ROOT / "CONTRIBUTING.md"),
    }


def above_limits(found: dict[str, int]) -> list[str]:
    """Return a line for each figure above its limit."""
    return [
        f"{name}: {found[name]:,} (limit {limit:,})"
        for name, limit in LIMITS.items()
        if found[name] > limit
    ]


def main(arguments: Sequence[str]) -> int:
    """Print what the arguments ask for; return the exit status."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if arguments[:1] == ["--words"]:
        for path in files(*(arguments[1:] or ["memtrain"])):
            names = private_names(path) if path.suffix == ".py" else []
            for line, word in sorted({*private_words(path), *names}):
                console.print(f"{path.relative_to(ROOT)}:{line}: {word}")
        return 0
    found = figures()
    if arguments == ["--check"]:
        for line in above_limits(found):
            console.print(line)
        return bool(above_limits(found))
    table = Table("figure", "now", "limit", "goal")
    for name, limit in LIMITS.items():
        table.add_row(name, f"{found[name]:,}", f"{limit:,}", f"{GOALS[name]:,}")
    console.print(table)
    parts = Counter({p.name: sum(map(length, files(f"memtrain/{p.name}")))
                     for p in (ROOT / "memtrain").iterdir() if p.is_dir()})  # fmt: skip
    console.print("lines by package: " + ", ".join(f"{k} {n:,}" for k, n in parts.most_common()))
    every = files("memtrain", "tests", "experiments", "benchmarks")
    longest = Counter({str(path.relative_to(ROOT)): length(path) for path in every})
    console.print("longest files: " + ", ".join(f"{k} {n}" for k, n in longest.most_common(10)))
    named = Counter(word.lower() for p in files("memtrain") for _, word in private_words(p))
    console.print("private words: " + ", ".join(f"{k} {n}" for k, n in named.most_common(12)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

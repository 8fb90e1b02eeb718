"""The FAQ quotes messages that the package has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUOTED = re.findall(r'(?m)^### "(.+)"$', (ROOT / "docs/faq.md").read_text())


@pytest.fixture(scope="module")
def messages():
    """Every string of the package, with a space in place of each value."""
    found = []
    for path in (ROOT / "memtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else " " for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_there_are_quotes():
    assert len(QUOTED) >= 10


@pytest.mark.parametrize("quote", QUOTED)
def test_the_package_has_the_message(quote, messages):
    assert quote in messages

"""Figures of the code's structure stay within the limits of `benchmarks/structure.py`."""

import pytest

from benchmarks import structure


@pytest.fixture(scope="module")
def found():
    return structure.figures()


def test_no_figure_is_above_its_limit(found):
    assert structure.above_limits(found) == []
    assert set(found) == set(structure.LIMITS) == set(structure.GOALS)
    assert all(goal <= structure.LIMITS[name] for name, goal in structure.GOALS.items())


def test_private_words_are_found_in_prose_and_in_names(tmp_path, monkeypatch):
    path = tmp_path / "module.py"
    path.write_text(
        '"""A kink of it."""\n\n'
        "def mend(x, leavingPort):  # nothing is told\n"
        '    told_of = f"{x} is alike"\n'
        "    return told_of\n\n"
        "mended_tables = 'retold, untold'\n"
    )
    assert structure.private_words(path) == [(1, "kink"), (3, "told"), (4, "alike")]
    names = [name for _, name in structure.private_names(path)]
    assert sorted(names) == ["leavingPort", "mend", "mended_tables", "told_of"]
    (package := tmp_path / "memtrain/module.py").parent.mkdir()
    package.write_text("is_given = holds_mine = unforeign = outside\n")
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert [name for _, name in structure.private_names(package)] == ["is_given", "holds_mine"]
    page = tmp_path / "page.md"
    page.write_text("four words stand here\n\n```sh\nnot counted\n```\n")
    assert structure.words(page) == 4


def test_the_command_prints_every_figure_and_fails_above_a_limit(found, capsys, monkeypatch):
    monkeypatch.setattr(structure, "figures", lambda: found)
    monkeypatch.setattr(structure, "private_words", lambda path: [])
    assert structure.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in structure.LIMITS)
    assert structure.main(["--check"]) == 0
    monkeypatch.setitem(structure.LIMITS, "classes", 1)
    assert structure.main(["--check"]) == 1
    assert "classes: " in capsys.readouterr().out

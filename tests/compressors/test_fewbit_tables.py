import copy
import math
import os
import pickle
import threading

import numpy as np
import pytest

from memtrain.compressors.fewbit import solver, tables
from memtrain.compressors.fewbit.solver import solve, table
from memtrain.compressors.fewbit.tables import (
    TABLES,
    from_table,
    load_npz,
    named_table,
    register_table,
    save_npz,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


STEP = from_table([-1.0, 0.0, 2.0], [0.1, 0.2, 0.3, 0.4], shift=0.5, error=0.25)


@pytest.mark.parametrize("parity", ["plain", "even", "band"])
def test_from_table_means_what_the_contract_says(parity):
    inner, levels = ([0.5, 1.0], [7.0, 9.0])
    if parity != "band":
        inner, levels = [0.5], [7.0, 9.0]
    step = from_table(inner, levels, parity, 1.0)
    x = np.array([0.0, 0.5, 1.0, 1.5, 1.75, 2.0, 2.25, np.inf, -np.inf])
    side = x - 1.0
    if parity == "plain":
        upper = side > 0.5
    elif parity == "even":
        upper = abs(side) > 0.5
    else:
        upper = (side > 0.5) & (side <= 1.0)
    assert step(x).tolist() == np.where(upper, 9.0, 7.0).tolist()
    assert step.bits == 1
    assert math.isnan(step.error)


def test_tables_of_unknown_error_are_equal():
    step = from_table([0.0], [1.0, 2.0])
    assert pickle.loads(pickle.dumps(step)) == step
    assert hash(copy.deepcopy(step)) == hash(step)
    assert step != from_table([0.0], [1.0, 3.0])


def test_tables_survive_a_file(tmp_path):
    tables = {
        "plain": STEP,
        "gelu": table("gelu", 3),
        "tanh": table("tanh", 2),
        "relu6": table("relu6", 1),
        "unknown error": from_table([0.0], [1.0, 2.0]),
    }
    path = tmp_path / "tables.npz"
    save_npz(path, tables)
    found = load_npz(path)
    assert found == tables
    assert [repr(found[name].error) for name in tables] == [repr(t.error) for t in tables.values()]
    assert os.listdir(tmp_path) == ["tables.npz"]


def test_fewbits_own_files_are_read(tmp_path):
    # Borders with the interval's ends; two digits of bits (fewbit, StepwiseStore.load).
    path = tmp_path / "builtin.npz"
    inner, levels = [-0.5, 0.0, 0.5], [0.0, 0.3, 0.7, 1.0]
    np.savez(
        path,
        **{
            "gelu02-borders": np.array([-100.0, *inner, 100.0], np.float32),
            "gelu02-levels": np.array(levels),
        },
    )
    assert load_npz(path) == {"gelu02": from_table(inner, levels)}


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "tables.npz"
    save_npz(path, {"a": STEP})

    def full(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(tables.np, "savez", full)
    with pytest.raises(OSError, match=r"tables\.npz.*no space left"):
        save_npz(path, {"b": STEP})
    assert load_npz(path) == {"a": STEP}
    assert os.listdir(tmp_path) == ["tables.npz"]
    with pytest.raises(OSError, match="missing"):
        save_npz(tmp_path / "missing" / "x.npz", {"a": STEP})
    with pytest.raises(ValueError, match="a/b"):
        save_npz(path, {"a/b": STEP})


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_what_is_no_npz_is_named(tmp_path, content):
    path = tmp_path / "wrong.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"wrong\.npz"):
        load_npz(path)


def test_files_without_whole_tables_are_named(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(ValueError, match=r"holds no table; its arrays: weights"):
        load_npz(path)
    np.savez(path, **{"a/levels": np.zeros(4)})
    with pytest.raises(ValueError, match=r"damaged.*a/boundaries"):
        load_npz(path)
    np.savez(path, **{"gelu02-levels": np.zeros(4), "gelu02-borders": np.zeros(4)})
    with pytest.raises(ValueError, match="damaged: 2 boundaries"):
        load_npz(path)
    with pytest.raises(FileNotFoundError):
        load_npz(tmp_path / "nothing.npz")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([0.0], [1.0, 2.0, 3.0]), "3 levels"),
        (([], [1.0]), "1 levels"),
        (([0.0, 1.0], [1.0, 2.0]), "2 boundaries"),
        (([0.0], [1.0, 2.0], "band"), "1 boundaries"),
        (([0.0, 1.0], [1.0, 2.0, 3.0, 4.0], "band"), "4 levels"),
        (([1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]), "1.0 comes before 0.0"),
        (([0.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]), "0.0 comes before 0.0"),
        (([float("nan")], [1.0, 2.0]), "not all finite"),
        (([0.0], [1.0, float("inf")]), "not all finite"),
        (([[0.0]], [1.0, 2.0]), "2 dimensions"),
        (([-1.0], [1.0, 2.0], "even"), "-1.0 is negative"),
        (([0.0], [1.0, 2.0], "odd"), "odd"),
        (([0.0], [1.0, 2.0], "plain", float("nan")), "shift"),
    ],
)
def test_what_is_no_table_is_refused(arguments, word):
    with pytest.raises(ValueError, match=word):
        from_table(*arguments)


def test_words_are_no_numbers():
    with pytest.raises(TypeError, match="boundaries"):
        from_table(["one"], [1.0, 2.0])


def test_names_of_tables(monkeypatch):
    monkeypatch.setitem(TABLES, "taken", STEP)
    register_table("taken", STEP)  # the same again: nothing to lose
    other = from_table([0.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="'taken' is taken"):
        register_table("taken", other)
    register_table("taken", other, replace=True)
    assert named_table("taken") == other
    with pytest.raises(ValueError, match=r"'nobody' is not registered .* registered: "):
        named_table("nobody")
    with pytest.raises(ValueError, match="''"):
        register_table("", STEP)
    with pytest.raises(TypeError, match="list"):
        register_table("numbers", [1, 2])


def test_slow_tables_are_kept_on_disk(folder, monkeypatch):
    solver.table.cache_clear()
    assert not folder.exists()
    first = table("softsign", 6)
    (path,) = folder.iterdir()
    solver.table.cache_clear()
    monkeypatch.setattr(solver, "solve", lambda *_: pytest.fail("solved again"))
    assert table("softsign", 6) == first
    assert path.suffix == ".npz"


@pytest.mark.parametrize("damage", [b"", b"rubbish", None], ids=["empty", "rubbish", "cut"])
def test_damaged_files_are_computed_again(folder, damage):
    name = tables.key("damage")
    tables.cached(name, lambda: STEP)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    calls = []
    assert tables.cached(name, lambda: calls.append(1) or STEP) == STEP
    assert calls == [1]
    assert load_npz(path) == {"table": STEP}


def test_a_folder_that_cannot_be_written_does_no_harm(folder):
    folder.write_text("a file in its place")
    assert tables.cached("name", lambda: STEP) == STEP


def test_writers_at_the_same_time_leave_one_whole_file(folder):
    barrier = threading.Barrier(8)
    results = []

    def work():
        def compute():
            barrier.wait()
            return STEP

        results.append(tables.cached("same", compute))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [STEP] * 8
    assert [path.name for path in folder.iterdir()] == ["fewbit-same.npz"]


def test_the_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEMTRAIN_CACHE")
    monkeypatch.setattr(tables.sys, "platform", "linux")
    assert tables.folder() == tmp_path.resolve() / "memtrain"
    monkeypatch.setattr(tables.sys, "platform", "darwin")
    assert tables.folder().parts[-3:] == ("Library", "Caches", "memtrain")
    monkeypatch.setattr(tables.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert tables.folder() == tmp_path.resolve() / "local" / "memtrain"


def test_solved_tables_are_valid_from_outside():
    for function in ("gelu", "tanh"):
        step = solve(function, 3)
        again = from_table(step.boundaries, step.levels, step.parity, error=step.error)
        assert again == step

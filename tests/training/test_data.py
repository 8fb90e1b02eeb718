import sysconfig
from pathlib import Path

import pytest
import torch

from memtrain.training import data
from memtrain.training.data import Text, build_source, split_files, stdlib_files


@pytest.fixture
def folder(tmp_path):
    for name in (
        "a.py",
        "b.py",
        "pkg/c.py",
        "test/no.py",
        "site-packages/no.py",
        "pkg/tests/no.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n" * 20)
    (tmp_path / "data.txt").write_text("no")
    return tmp_path


def test_stdlib_files_are_the_librarys_own_source(folder):
    names = [path.relative_to(folder).as_posix() for path in stdlib_files(folder)]
    assert names == ["a.py", "b.py", "pkg/c.py"]


def test_stdlib_of_this_python_is_large():
    files = stdlib_files(Path(sysconfig.get_path("stdlib")))
    assert "argparse.py" in {path.name for path in files}
    assert sum(path.stat().st_size for path in files) > 5_000_000


def test_split_is_by_file_seeded_and_complete():
    files = [Path(f"{i}.py") for i in range(50)]
    train, validation = split_files(files, 0.1, seed=3)
    assert len(validation) == 5
    assert sorted(train + validation) == sorted(files)
    assert split_files(files, 0.1, seed=3) == (train, validation)
    assert split_files(files, 0.1, seed=4) != (train, validation)


def test_split_leaves_a_file_to_each_side_and_needs_two():
    files = [Path("a"), Path("b")]
    for share in (0.01, 0.99):
        assert [len(part) for part in split_files(files, share, 0)] == [1, 1]
    with pytest.raises(FileNotFoundError, match="found 1 source files"):
        split_files(files[:1], 0.5, 0)


def test_validation_text_holds_no_training_file(folder, monkeypatch):
    files = stdlib_files(folder)
    monkeypatch.setattr(data, "stdlib_files", lambda root: files)
    text = data.stdlib(0, sequence=8, validation=0.4)
    lines = {
        split: set(bytes(part.numpy()).split(b"\n")) - {b""} for split, part in text.parts.items()
    }
    assert not lines["train"] & lines["validation"]
    assert lines["train"] | lines["validation"] == {b"# a.py", b"# b.py", b"# pkg/c.py"}


def test_text_batches_are_functions_of_seed_split_and_step(few_files):
    source = build_source({"name": "stdlib", "sequence": 16}, seed=1)
    other = build_source({"name": "stdlib", "sequence": 16}, seed=1)
    batch = source.batch("train", 5, 4)
    source.batch("train", 6, 4)
    torch.manual_seed(9)  # the global generator plays no part
    assert torch.equal(batch[0], other.batch("train", 5, 4)[0])
    assert not torch.equal(batch[0], source.batch("train", 6, 4)[0])
    assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    assert batch[0].shape == batch[1].shape == (4, 16)


def test_text_reaches_both_ends():
    part = torch.arange(10, dtype=torch.uint8)
    text = Text({"train": part, "validation": part}, sequence=8, seed=0)
    starts = {int(text.batch("train", i, 4)[0][0, 0]) for i in range(40)}
    assert starts == {0, 1}


def test_too_long_sequence_is_an_error(few_files):
    with pytest.raises(ValueError, match=r"data.sequence=10000000 is too long"):
        build_source({"name": "stdlib", "sequence": 10_000_000}, seed=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "json"}, "did you mean 'jsonl'"),
        ({}, "data.name='None' is unknown"),
        ({"name": "stdlib", "sequense": 4}, "unknown key 'data.sequense'; did you mean 'sequence'"),
        ({"name": "stdlib", "validation": 1.0}, "data.validation=1.0 is out of range"),
        ({"name": "stdlib", "validation": float("nan")}, "data.validation=nan is out of range"),
    ],
)
def test_bad_data_config(spec, message):
    with pytest.raises(ValueError, match=message):
        build_source(spec, seed=0)

import pytest
import torch

from memtrain.training import checkpoint

CONTENT = {
    "config": {},
    "summaries": {},
    "finished_rows": [],
    "a": torch.arange(5),
    "rows": [["plain", 1, None]],
    "current": {"model": {"w": torch.ones(2)}, "b": 1.5},
}


def test_round_trip_from_folder_and_file(tmp_path):
    path = tmp_path / checkpoint.NAME
    checkpoint.write_checkpoint(path, CONTENT)
    for where in (tmp_path, path, str(path)):
        loaded = checkpoint.read_checkpoint(where)
        assert torch.equal(loaded["a"], CONTENT["a"])
        assert loaded["rows"] == CONTENT["rows"]
        assert torch.equal(loaded["current"]["model"]["w"], torch.ones(2))
    assert [item.name for item in tmp_path.iterdir()] == [checkpoint.NAME]


def test_write_into_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OSError, match="cannot write checkpoint"):
        checkpoint.write_checkpoint(tmp_path / "gone" / "checkpoint.pt", CONTENT)


def test_missing_damaged_and_unsupported_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.read_checkpoint(tmp_path)
    path = tmp_path / checkpoint.NAME
    checkpoint.write_checkpoint(path, CONTENT)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        checkpoint.read_checkpoint(path)
    checkpoint.write_checkpoint(path, {**CONTENT, "table": torch.full((999,), 7.0)})
    written = path.read_bytes()
    sevens = torch.full((99,), 7.0).numpy().tobytes()
    path.write_bytes(written.replace(sevens, bytes(len(sevens)), 1))
    with pytest.raises(ValueError, match="readable checkpoint: the checksum of 'archive"):
        checkpoint.read_checkpoint(path)
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is not a memtrain-train checkpoint of format 2"):
        checkpoint.read_checkpoint(path)
    for key, lacking in (("config", "config"), ("current", "current")):
        content = {name: value for name, value in CONTENT.items() if name != key}
        checkpoint.write_checkpoint(path, content)
        with pytest.raises(ValueError, match=f"not a complete checkpoint: it lacks {lacking}"):
            checkpoint.read_checkpoint(path)
    checkpoint.write_checkpoint(path, {**CONTENT, "current": {}})
    with pytest.raises(ValueError, match=r"it lacks current\.model"):
        checkpoint.read_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="is not a memtrain-train checkpoint"):
        checkpoint.read_checkpoint(path)

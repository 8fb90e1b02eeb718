"""Fashion-MNIST's files: what is read of them, and what is said of those that are not there."""

import gzip
import struct

import pytest
import torch

from experiments.fashion import read_fashion, read_idx
from memtrain.training.data import build_source


def write(path, shape, content):
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    path.write_bytes(gzip.compress(header + bytes(content)))


@pytest.fixture
def folder(tmp_path):
    """Three images and two: all pixels of an image are its number, its class is the number."""
    read_fashion.cache_clear()
    for name, count in (("train", 3), ("t10k", 2)):
        pixels = [number for number in range(count) for _ in range(28 * 28)]
        write(tmp_path / f"{name}-images-idx3-ubyte.gz", (count, 28, 28), pixels)
        write(tmp_path / f"{name}-labels-idx1-ubyte.gz", (count,), range(count))
    return tmp_path


def test_images_are_scaled_and_counted(folder):
    spec = {"name": "fashion", "folder": str(folder), "train": 2, "validation": 2}
    source = build_source(spec, seed=0)
    images, targets = source.parts["train"]
    assert images.shape == (2, 1, 28, 28)
    assert targets.tolist() == [0, 1]
    assert images[1, 0, 5, 5].item() == pytest.approx((1 / 255 - 0.2860) / 0.3530)
    assert source.parts["validation"][0].shape == (2, 1, 28, 28)


def test_smaller_sides_are_means(tmp_path):
    read_fashion.cache_clear()
    for name in ("train", "t10k"):
        rows = [(row % 4) * 4 for row in range(28) for _ in range(28)]
        write(tmp_path / f"{name}-images-idx3-ubyte.gz", (1, 28, 28), rows)
        write(tmp_path / f"{name}-labels-idx1-ubyte.gz", (1,), [7])
    of = {"name": "fashion", "folder": str(tmp_path)}
    for side, expected in ((14, [2.0, 10.0, 2.0]), (7, [6.0, 6.0, 6.0])):
        images, _ = build_source({**of, "side": side}, seed=0).parts["train"]
        assert images.shape == (1, 1, side, side)
        pixels = (images[0, 0, :3, 0] * 0.3530 + 0.2860) * 255
        assert torch.allclose(pixels, torch.tensor(expected), atol=1e-4)


def test_the_seed_changes_the_order_only(folder):
    spec = {"name": "fashion", "folder": str(folder)}
    orders = set()
    for seed in range(8):
        source = build_source(spec, seed)
        assert source.parts["train"][1].tolist() == [0, 1, 2]
        orders.add(tuple(source.batch("train", 0, 3)[1].tolist()))
        assert source.batch("train", 0, 3)[1].sort().values.tolist() == [0, 1, 2]
    assert len(orders) > 1


def test_missing_files_tell_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        build_source({"name": "fashion", "folder": str(tmp_path)}, seed=0)


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"\0"),
        gzip.compress(struct.pack(">HBBI", 0, 9, 1, 2) + b"ab"),
        gzip.compress(struct.pack(">HBBI", 0, 8, 1, 3) + b"ab"),
    ],
    # The bytes carry the time of day: named by them, the cases would differ between workers.
    ids=["no gzip", "one byte", "no bytes", "too short"],
)
def test_damaged_files_are_named(tmp_path, content):
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.gz' is no IDX file"):
        read_idx(path)


def test_images_and_classes_must_agree(folder):
    write(folder / "train-labels-idx1-ubyte.gz", (2,), (0, 1))
    with pytest.raises(ValueError, match=r"train images and classes are \[3, 28, 28\] and \[2\]"):
        read_fashion(folder)


@pytest.mark.parametrize(
    ("field", "message"),
    [("side: 10", "data.side=10; allowed: 28, 14, 7"), ("train: 0", "data.train=0 is out")],
)
def test_bad_values(field, message):
    name, value = field.split(": ")
    with pytest.raises(ValueError, match=message):
        build_source({"name": "fashion", name: int(value)}, seed=0)

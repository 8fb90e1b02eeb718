"""Swapping: what is copied when, with a device that only writes down what it is asked."""

import gc

import pytest
import torch

from memtrain.compressors import Group, Host, Identity, Key, Samples, host


class Lane:
    """Copies that are asked for and waited for, in order."""

    def __init__(self):
        self.log = []

    def out(self, tensors):
        copies = {name: x.clone() for name, x in tensors.items()}
        self.log.append(("out", self.label(copies)))
        return copies

    def back(self, tensors):
        self.log.append(("back", self.label(tensors)))
        return {name: x.clone() for name, x in tensors.items()}, self.label(tensors)

    def wait(self, tensors, started):
        assert started == self.label(tensors)
        self.log.append(("wait", started))

    @staticmethod
    def label(tensors):
        return int(tensors["tensor"][0])


@pytest.fixture
def lane(monkeypatch):
    lane = Lane()
    monkeypatch.setattr(host, "transfers", lambda x: lane)
    monkeypatch.setattr(host, "_newest", {})
    return lane


def payloads(n):
    compressor = Host(inner=Identity())
    packed = [compressor.compress(torch.full((4,), float(i)), key=Key()) for i in range(n)]
    return compressor, packed


def test_a_backward_finds_the_next_payload_on_its_way(lane):
    compressor, packed = payloads(3)
    assert lane.log == [("out", 0), ("out", 1), ("out", 2)]
    lane.log.clear()
    for i in (2, 1, 0):
        assert compressor.decompress(packed[i]).tolist() == [float(i)] * 4
    assert lane.log == [
        ("back", 2), ("back", 1), ("wait", 2), ("back", 0), ("wait", 1), ("wait", 0),
    ]  # fmt: skip


def test_a_second_backward_fetches_again(lane):
    compressor, packed = payloads(1)
    for _ in range(2):
        assert compressor.decompress(packed[0]).tolist() == [0.0] * 4
    assert lane.log == [("out", 0), ("back", 0), ("wait", 0), ("back", 0), ("wait", 0)]


def test_a_payload_that_is_gone_is_not_fetched(lane):
    compressor, packed = payloads(3)
    del packed[1]
    gc.collect()
    lane.log.clear()
    compressor.decompress(packed[1])
    assert lane.log == [("back", 2), ("wait", 2)]


def test_what_comes_back_is_the_inner_compressors(lane, monkeypatch):
    monkeypatch.setattr(Lane, "label", staticmethod(lambda tensors: tuple(tensors)))
    x = torch.randn(5, 300)
    for inner in (Group(bits=3), Samples(bits=(4, 1))):
        compressor = Host(inner=inner)
        swapped = compressor.compress(x, key=Key(seed=2))
        assert torch.equal(
            compressor.decompress(swapped), inner.decompress(inner.compress(x, key=Key(seed=2)))
        )
    assert lane.log


def test_host_memory_is_not_copied():
    x = torch.ones(600)
    packed = Host(inner=Identity()).compress(x, key=Key())
    assert packed.tensors["tensor"] is x


def test_fake_tensors_of_a_device_go_to_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    compressor = Host(inner=Group(bits=2))
    with FakeTensorMode():
        x = torch.empty(512, device="cuda")
        packed = compressor.compress(x, key=Key())
        assert {t.device.type for t in packed.tensors.values() if t.numel()} == {"cpu"}
        assert compressor.decompress(packed).device.type == "cuda"
        # as after `save_for_backward`, which keeps the tensors only
        plain = packed._replace(tensors=dict(packed.tensors))
        assert compressor.decompress(plain).device.type == "cuda"


def test_shaped_follows_the_inner_compressor():
    assert Host(inner=Samples()).shaped
    assert not Host(inner=Group()).shaped


def test_inner_must_be_a_compressor():
    with pytest.raises(TypeError, match="inner='group' is a str"):
        Host(inner="group")

"""Swapping: what is copied when, with a device that only writes down what it is asked."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from memtrain.compressors import Group, Host, Identity, Key, Samples, host
from memtrain.kernels import copies_to_host


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


class Event:
    """Stands for one of CUDA's."""

    def __init__(self, blocking=False):
        self.time = 0.0

    def record(self, stream):
        self.time = stream.time


class Stream:
    """A queue of a device: what is asked of it begins at `time`, when all before it has ended."""

    def __init__(self, device=None):
        self.time = 0.0

    def wait_stream(self, other):
        self.time = max(self.time, other.time)

    def wait_event(self, event):
        self.wait_stream(event)

    def record_event(self):
        event = Event()
        event.record(self)
        return event


class Bus:
    """Streams, a bus, and an allocator that gives memory away in the order of a stream.

    The host asks for everything at time 0, as one that runs ahead of its device. A layer takes a
    unit of time, a copy `slow` units. What `record_stream` has touched is not seen to be free
    before the host waits, so never.
    """

    def __init__(self, monkeypatch, slow):
        self.slow, self.current = slow, Stream()
        self.main, self.held, self.peak = self.current, 0, 0
        empty_like = torch.empty_like
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch, "empty_like", lambda x, device: self.allocated(empty_like(x)))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: x.memory.recorded.append(s))
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **how: self.copy(*args, **how))
        monkeypatch.setattr(copies_to_host, "pinned", empty_like)
        monkeypatch.setattr(host, "_newest", {})

    @contextmanager
    def entered(self, stream):
        previous, self.current = self.current, stream
        yield
        self.current = previous

    def copy(self, to, x, non_blocking):
        assert non_blocking
        device = [one.memory for one in (to, x) if hasattr(one, "memory")]
        assert all(self.current.time >= memory.made for memory in device), "copied too early"
        self.current.time += self.slow
        for memory in device:
            memory.used_until = self.current.time

    def allocated(self, x):
        now = self.current.time
        x.memory = SimpleNamespace(stream=self.current, made=now, used_until=0.0, recorded=[])
        self.held += 1
        self.peak = max(self.peak, self.held)
        weakref.finalize(x, self.freed, x.memory)
        return x

    def born(self):
        """What a layer saves."""
        self.current.time += 1
        return self.allocated(torch.empty(1))

    def forward(self, lane, streams=(None,) * 3):
        """The payloads of a forward, a layer on each stream: None is the main one."""
        payloads, device = [], torch.device("cpu")
        for stream in streams:
            with self.entered(stream or self.main):
                payloads.append(host._Swapped({"codes": self.born()}, lane, device))
        return payloads

    def read(self, x):
        """What a layer's backward does."""
        assert self.current.time >= x.memory.used_until, "read before it is there"
        assert self.current in (x.memory.stream, *x.memory.recorded), "given away while it is read"
        self.current.time += 1
        x.memory.used_until = self.current.time

    def freed(self, memory):
        if not memory.recorded:
            assert memory.stream.time >= memory.used_until, "given away while it is copied"
            self.held -= 1


@pytest.mark.parametrize("slow", [0.5, 3.0])
def test_a_forward_does_not_outrun_the_bus(monkeypatch, slow):
    bus = Bus(monkeypatch, slow)
    lane = host._Streams(torch.device("cpu"))
    for _ in range(20):
        lane.out({"codes": bus.born()})
    assert bus.peak <= 3  # of 20: the new one, and two on their way
    assert bus.main.time >= 20 * max(1, slow) - 3 * slow  # the device waits for the bus
    lane.wait(*lane.back({}))
    assert bus.held == 0


def test_a_backward_does_not_give_away_what_a_later_forward_sends(monkeypatch):
    bus = Bus(monkeypatch, 3.0)
    lane = host._Streams(torch.device("cpu"))
    first, second = bus.forward(lane), bus.forward(lane)
    for payload in reversed(second):
        payload.fetch()  # at last asks for the first forward's last payload
    third = bus.forward(lane)
    for payload in reversed(first):
        payload.fetch()
    del first, second, third, payload
    assert bus.held == 0


def test_nor_does_a_graph_that_dies_without_a_backward(monkeypatch):
    bus = Bus(monkeypatch, 3.0)
    lane = host._Streams(torch.device("cpu"))
    validation = bus.forward(lane)
    for payload in reversed(bus.forward(lane)):  # a training step
        payload.fetch()
    del payload
    validation = bus.forward(lane)  # the graph before this one dies when it ends
    for payload in reversed(validation):
        payload.fetch()
    assert bus.held == 0


def test_the_layers_of_a_step_are_on_two_streams(monkeypatch):
    bus, side = Bus(monkeypatch, 3.0), Stream()
    lane = host._Streams(torch.device("cpu"))
    streams = [bus.main, side, bus.main, side, bus.main, bus.main]
    step = [*zip(streams, bus.forward(lane, streams), strict=True)]
    while step:
        stream, payload = step.pop()
        with bus.entered(stream):  # as autograd does
            bus.read(payload.fetch()["codes"])
    del payload
    assert bus.held == 4  # each asked for on the other stream than reads it


def test_what_comes_back_unasked_is_waited_for(lane):
    compressor, packed = payloads(2)
    compressor.decompress(packed[1])  # starts the way back of the one before
    del packed
    gc.collect()
    assert lane.log[-2:] == [("wait", 1), ("wait", 0)]


def test_a_payload_that_was_saved_as_tensors_comes_back_by_its_lane(lane):
    compressor, packed = payloads(1)
    plain = packed[0]._replace(tensors=dict(packed[0].tensors))
    assert compressor.decompress(plain).tolist() == [0.0] * 4
    assert lane.log == [("out", 0), ("back", 0), ("wait", 0)]


def test_pinned_copies_lie_on_the_host_whatever_the_default_device(monkeypatch):
    made = {}
    with torch.device("meta"):
        # torch lists the functions that it serves once: before one is replaced.
        assert torch.empty(0).is_meta
        monkeypatch.setattr(torch, "empty_like", lambda like, **options: made.update(options))
        copies_to_host.pinned(torch.ones(2, device="cpu"))
    assert made == {"device": "cpu", "pin_memory": True}

"""The GPU's test of a capture that is broken off, on the CPU: `torch.cuda.graph` over stand-ins."""

import warnings

import pytest
import torch
import torch._dynamo  # which asks torch.cuda when it is imported
from torch.utils._python_dispatch import TorchDispatchMode

from tests import test_gpu


class Stream:
    """Of CUDA, by name."""

    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        pass


class Device(TorchDispatchMode):
    """The state of torch.cuda: the current stream, and the kernels of a capture."""

    def __init__(self):
        super().__init__()
        self.streams, self.kernels = [Stream("current")], None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.kernels is not None and func is torch.ops.aten.mul_.Tensor:
            self.kernels.append(func)
        return func(*args, **(kwargs or {}))

    def stream(self, stream):
        device = self

        class Current:
            def __enter__(self):
                device.streams.append(stream)

            def __exit__(self, *_):
                device.streams.pop()

        return Current()

    def graph(self):
        device = self

        class Graph:
            def capture_begin(self, *args, **kwargs):
                device.kernels = []

            def capture_end(self):
                kernels, device.kernels = device.kernels, None
                if not kernels:
                    warnings.warn("The CUDA Graph is empty.", stacklevel=2)

        return Graph()


@pytest.fixture
def device(monkeypatch):
    device, ones, captured = Device(), torch.ones, test_gpu.captured
    for name, value in {
        "Stream": lambda: Stream("side"),
        "stream": device.stream,
        "current_stream": lambda: device.streams[-1],
        "CUDAGraph": device.graph,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: device.kernels is not None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", Stream("capture"))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    # A step outside of a capture, which warms up, would find no CUDA.
    monkeypatch.setattr(test_gpu, "captured", lambda step: captured(step, warm=0))
    with device:
        yield device


def test_a_capture_that_raises_warns_of_no_empty_graph_and_leaves_its_stream(device):
    test_gpu.test_a_capture_without_capturable_raises()
    assert [stream.name for stream in device.streams] == ["current"]
    assert device.kernels is None


def test_of_an_empty_graph_torch_warns_before_it_leaves_the_stream(device):
    """The test above would meet that, did its step launch nothing before it raises."""
    with pytest.raises(UserWarning, match="empty"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
    assert [stream.name for stream in device.streams] == ["current", "capture"]

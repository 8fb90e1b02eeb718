"""A step is simulated in the thread that simulates it, and nowhere else."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from memtrain.kernels.dispatch import backend_of, host_work, is_for_cuda, is_simulated, simulating
from memtrain.optim import AdamW4bit


@pytest.fixture
def elsewhere():
    """Another thread, which simulates a step for CUDA as long as the test runs."""
    begun, ended = Event(), Event()

    def simulate():
        with simulating("cuda"):
            begun.set()
            ended.wait()
        return is_simulated()

    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(simulate)
        begun.wait()
        yield
        ended.set()
        assert not inside.result()


@pytest.mark.usefixtures("elsewhere")
def test_a_step_beside_one_that_is_simulated_in_another_thread():
    x = torch.ones(2, 64)
    assert [is_simulated(), is_for_cuda(x), backend_of(x) == "triton"] == [False] * 3
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW4bit([weight], lr=0.1)
    (x @ weight).sum().backward()
    optimizer.step()
    assert (weight < -0.05).all()


def test_the_backward_of_a_simulated_step_is_simulated():
    found = []
    with simulating("cuda"), FakeTensorMode():
        weight = nn.Parameter(torch.ones(4, 4))
        weight.register_post_accumulate_grad_hook(lambda p: found.append(is_for_cuda(p.grad)))
        y = torch.ones(2, 4) @ weight
        y.register_hook(lambda grad: found.append(is_for_cuda(grad)))
        y.sum().backward()
    assert found == [True, True]


def test_the_hosts_own_work_is_for_no_device():
    with simulating("cuda"):
        with host_work():
            assert not is_for_cuda(torch.ones(2))
            assert backend_of(torch.ones(2)) != "triton"
            with host_work(on_host=False):
                assert is_for_cuda(torch.ones(2))
        assert is_for_cuda(torch.ones(2))


@pytest.mark.usefixtures("elsewhere")
def test_a_compiled_function_goes_by_the_thread_that_calls_it():
    def calls():
        x = torch.zeros(2)
        run = torch.compile(lambda x: x + is_for_cuda(x), backend="eager", fullgraph=True)
        before = run(x)
        with simulating("cuda"):
            return [bool(before.any()), bool(run(x).all())]

    with ThreadPoolExecutor(1) as pool:  # a thread that has simulated nothing yet
        assert pool.submit(calls).result() == [False, True]

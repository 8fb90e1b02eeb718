"""Bytes of tensors that are alive: of storages, of an optimizer's states, of what ops allocate."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.audit.allocations import Allocations
from memtrain.audit.live_storages import LiveStorages, saved_nbytes, storage_nbytes
from memtrain.audit.live_tensors import state_tensors


def test_freed_storages_vanish_and_their_addresses_are_not_confused():
    with LiveStorages() as live:
        for _ in range(200):
            x = torch.empty(64)
            del x
        kept = [torch.empty(64) for _ in range(10)]
    assert live.nbytes() == 10 * 256
    del kept[3:]
    assert live.nbytes() == 3 * 256


def test_views_count_once_and_keep_the_whole_storage():
    with LiveStorages() as live:
        x = torch.zeros(10, 100)
        views = [x.T, x[1], x.view(-1), x.detach(), x.as_strided((2,), (1,))]
    assert live.nbytes() == 4000
    del x
    assert live.nbytes() == 4000
    del views
    assert live.nbytes() == 0


def test_views_and_in_place_writes_of_older_tensors_do_not_count():
    x = torch.zeros(1000)
    with LiveStorages() as live:
        y = x[:10]
        x.add_(1)
        torch.mul(x, 2, out=x)
    assert live.nbytes() == 0
    assert y.sum() == 20


def test_resized_storages_count_at_their_present_size():
    with LiveStorages() as live:
        x = torch.zeros(100)
        x.resize_(1000)
        assert live.nbytes() == 4000
        x.untyped_storage().resize_(0)  # as FSDP frees a full parameter
        assert live.nbytes() == 0
    assert live.peak_nbytes == 4000


def test_peak_sees_temporaries_that_are_gone_at_the_end():
    with LiveStorages() as live:
        x = torch.zeros(1000)
        y = x + 1
        del x
        z = y + 1
        del y
    assert live.peak_nbytes == 8000
    assert live.nbytes(exclude=[z]) == 0


def test_adopted_tensors_count_until_they_die():
    old = torch.zeros(1000)
    with LiveStorages() as live:
        live.adopt([old, old[3:]])
        new = old + 1
        assert live.nbytes() == 8000
        del old
        assert live.nbytes(exclude=[new]) == 0
    assert live.peak_nbytes == 8000


def test_saved_tensor_hooks_are_seen():
    x = torch.ones(1024, requires_grad=True)

    def forward():
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.to(torch.bfloat16), lambda t: t.float()
        ):
            return x.sin().sin()

    assert saved_nbytes(forward)[0] == 2 * 2048  # x too now has a copy, of half the size


def test_fake_and_empty_and_scalar_tensors():
    with FakeTensorMode(), LiveStorages() as live:
        x = torch.empty(1 << 30)
    assert live.nbytes() == 4 << 30
    del x
    with LiveStorages() as live:
        tensors = [torch.zeros(0), torch.tensor(1.0), torch.zeros(3, dtype=torch.float16)]
    assert live.nbytes() == storage_nbytes(tensors) == 10


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_count_their_parts():
    index = torch.tensor([[0, 5]])
    with LiveStorages() as live:
        x = torch.sparse_coo_tensor(index, torch.ones(2), (1000,), check_invariants=True).coalesce()
    assert live.nbytes() == storage_nbytes([x]) == 2 * 8 + 2 * 4


def measure_states(optimizer):
    return storage_nbytes(state_tensors(optimizer))


def _stepped(optimizer_class, **options):
    model = nn.Linear(10, 5)
    optimizer = optimizer_class(model.parameters(), **options)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return optimizer


def test_bytes_hidden_outside_state_count():
    optimizer = _stepped(torch.optim.SGD, lr=0.1)
    optimizer.buffers = [{"codes": (torch.zeros(3), torch.zeros(4))}]
    optimizer.inner = _stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    inner = 55 * 4 + 55 * 4  # its momentum, and its parameters, which are not the outer one's
    assert measure_states(optimizer) == 7 * 4 + inner
    optimizer.loop = optimizer.buffers  # seen twice, and a cycle
    optimizer.buffers.append(optimizer.buffers)
    assert len(state_tensors(optimizer)) == len({id(t) for t in state_tensors(optimizer)})


CPU = torch.device("cpu")


def counted(meter, run, model, x):
    with meter as live:
        live.adopt(model.parameters())
        loss = run(x).square().mean()
        held = live.nbytes(exclude=[loss, *model.parameters()])
        loss.backward()
        model.zero_grad()
    return held, live.nbytes(), live.peak_nbytes


def test_what_an_eager_step_allocates_is_what_its_storages_hold():
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(8, 64)
    model(x).sum().backward()
    model.zero_grad()
    found = [counted(meter, model, model, x) for meter in (LiveStorages(), Allocations(CPU))]
    assert found[0][:2] == found[1][:2]
    assert found[0][2] <= found[1][2]  # temporaries inside ops too


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_is_counted_too():
    torch.compiler.reset()
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(8, 64)
    run = torch.compile(model)
    run(x).square().mean().backward()
    model.zero_grad()
    held, after, peak = counted(Allocations(CPU), run, model, x)
    weights = sum(p.nbytes for p in model.parameters())
    # the tanh, and the output for the square outside, which eagerly is all too
    assert held == 8 * 256 * 4 + 8 * 64 * 4
    assert weights <= after <= weights + 4
    assert peak >= 2 * weights + 8 * 64 * 4

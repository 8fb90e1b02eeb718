"""Parts of parameters on the host, their mesh on another device: FSDP2's `CPUOffloadPolicy`.

The meta device stands for a mesh's GPU: what goes there by mistake has no values any more.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memtrain.kernels.step import shard
from memtrain.kernels.step.shard import all_reduce, for_collectives
from memtrain.optim import (
    AdamW4bit,
    AdamW8bitFactor,
    ReleaseGradients,
    SplitWeights,
    portable_state_dict,
)
from memtrain.optim.states import shards
from memtrain.optim.states.shards import local, placed_as, wait_for_part
from memtrain.optim.wrappers.gradient_norms import norm_of

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


@pytest.fixture
def mesh_of(monkeypatch):
    """Makes a mesh of this process on a device."""
    from torch.distributed.device_mesh import init_device_mesh

    one = SimpleNamespace(device_count=lambda: 1, is_initialized=lambda: True)
    monkeypatch.setattr(torch, "meta", one, raising=False)  # DTensor counts a mesh's devices
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo,meta:gloo", store=store, rank=0, world_size=1)
    yield lambda device: init_device_mesh(device, (1,))
    torch.distributed.destroy_process_group()


def part(value, mesh):
    """A tensor of which this process holds all rows, as FSDP2 makes them."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=whole)
    return DTensor(value, spec, requires_grad=False)


def parameter(mesh, seed=0):
    generator = torch.Generator().manual_seed(seed)
    param = nn.Parameter(part(torch.randn(128, 64, generator=generator), mesh))
    param.grad = part(torch.randn(128, 64, generator=generator), mesh)
    return param


def devices(states):
    for value in states.values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if not isinstance(tensor, bytes):  # the count that plain optimizers refuse
                yield local(tensor).device.type


@pytest.mark.parametrize("make", [AdamW4bit, AdamW8bitFactor, SplitWeights])
def test_states_stay_with_their_part(make, mesh_of):
    runs = []
    for device in ("cpu", "meta"):
        param = parameter(mesh_of(device))
        if make is SplitWeights:
            param = nn.Parameter(part(local(param).bfloat16(), param.device_mesh))
            param.grad = part(torch.ones(128, 64).bfloat16(), param.device_mesh)
            optimizer = SplitWeights(AdamW4bit([param], min_elements=0))
        else:
            optimizer = make([param], min_elements=2**20 * (make is AdamW4bit))
        for _ in range(2):
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        assert {*devices(optimizer.state_dict()["state"][0])} == {"cpu"}
        runs.append(local(param.detach()))
    assert torch.equal(*runs)


def test_a_plain_checkpoint_is_split_where_the_part_is(mesh_of):
    whole = torch.randn(128, 64)
    param = parameter(mesh_of("meta"))
    assert torch.equal(local(placed_as(whole, param)), whole)
    optimizer = AdamW4bit([param], min_elements=0)
    optimizer.step()
    states = portable_state_dict(optimizer)
    assert {*devices(states["state"][0])} == {"cpu"}
    optimizer.load_state_dict(states)
    assert {*devices(optimizer.state[param])} == {"cpu"}


def test_a_step_counts_as_a_change_of_a_parameter_and_of_its_part(mesh_of):
    param = parameter(mesh_of("cpu"))
    before = param._version, local(param)._version
    AdamW4bit([param]).step()
    assert (param._version, local(param)._version) == (before[0] + 1, before[1] + 1)


def group_of(*kinds):
    return SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])


def test_what_a_group_has_no_backend_for_goes_to_its_device():
    x = torch.ones(3)
    assert for_collectives(x, group_of("cpu")) is x
    assert for_collectives(x, group_of("meta", "cpu")) is x
    assert for_collectives(x, group_of("meta")).device.type == "meta"


@pytest.mark.parametrize("op", ["max", "sum"])
def test_what_was_reduced_elsewhere_comes_back(op, monkeypatch):
    monkeypatch.setattr(shard, "for_collectives", lambda x, group: 2 * x)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, *op, group: x)
    parts = [torch.ones(3), torch.full((2, 2), 3.0)]
    all_reduce([("group", one) for one in parts], op)
    assert [one.unique().tolist() for one in parts] == [[2.0], [6.0]]


def test_norms_are_added_up_where_the_group_reduces(mesh_of, monkeypatch):
    grad = parameter(mesh_of("cpu")).grad
    expected = local(grad).norm().item()
    assert norm_of(grad) == pytest.approx(expected)
    monkeypatch.setattr(shards, "for_collectives", lambda x, group: 2 * x)
    assert norm_of(grad) == pytest.approx(2 * expected)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_released_part_that_is_on_its_way_to_pinned_memory_is_waited_for(
    pinned, mesh_of, monkeypatch
):
    """Its values arrive when the current stream is waited for: FSDP2's hooks come before that."""
    mesh, waits = mesh_of("cpu"), []
    param, twin = parameter(mesh), parameter(mesh)
    grad = local(param.grad)
    arrived = grad.clone()

    def synchronize():
        waits.append(grad.copy_(arrived))

    optimizer = ReleaseGradients(AdamW4bit([param]))
    if pinned:
        grad.fill_(torch.nan)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronize)
    )
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x is grad and pinned)
    optimizer.on_gradient(param)
    assert len(waits) == pinned
    optimizer.step()
    AdamW4bit([twin]).step()
    assert optimizer.skipped == 0
    assert torch.equal(local(param), local(twin))


def test_a_gradient_that_is_no_part_is_not_waited_for(monkeypatch):
    """`HostStates` waits for its own pinned gradients, beside what the stream does."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    wait_for_part(torch.ones(2))

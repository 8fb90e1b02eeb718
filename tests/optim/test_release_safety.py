"""Released gradients beside streams, threads, and errors: weights are never read half stepped."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.optim import AdamW4bit
from memtrain.optim.wrappers.release import ReleaseGradients
from tests.optim.test_host_states import Bus, beside, chain, run


def forward(model, step=0):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
    return model(x.to(model[0].weight.dtype)).float().square().sum()


READERS = {
    "a forward of the model": lambda model: forward(model, 1),
    "a forward of a part": lambda model: model[2](torch.ones(1, 34, dtype=torch.bfloat16)),
    "no module": lambda model: torch.cat([p.flatten() for p in model.parameters()]),
    "a checkpoint": lambda model: torch.cat([x.flatten() for x in model.state_dict().values()]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("passes", [1, 2])
def test_what_reads_weights_after_the_backward_reads_stepped_ones(reader, passes):
    """As in place, though copies back are there only when the device has joined them."""
    found = []
    for make_bus in (
        lambda model: Bus({p: p.shape for p in model.parameters()}),
        lambda model: None,
    ):
        model = chain()
        optimizer = beside(model, make_bus(model), accumulate=passes)
        for _ in range(2):
            for step in range(passes):
                forward(model, step).backward()
            found.append(READERS[reader](model).detach().clone())
            optimizer.step()
    assert all(map(torch.equal, found[:2], found[2:]))
    assert not torch.equal(found[0], found[1])


def test_two_threads_of_a_backward_send_one_gradient_at_a_time():
    """Autograd has a thread for each device: one worker, and each gradient goes over whole."""
    model = chain()
    bus = Bus({p: p.shape for p in model.parameters()})
    optimizer, inside, most = beside(model, bus), [], []
    whole, both = bus.to_host, threading.Event()

    def to_host(x):
        inside.append(1)
        most.append(len(inside))
        both.wait(0.02)  # the other thread runs
        inside.pop()
        return whole(x)

    bus.to_host = to_host
    params = list(model.parameters())
    before = {thread.ident for thread in threading.enumerate()}

    def backward(own):
        sum(p.float().square().sum() for p in own).backward()

    threads = [threading.Thread(target=backward, args=(params[k::2],)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    assert most == [1] * len(params)
    workers = [t for t in threading.enumerate() if t.name.startswith("memtrain-host-states")]
    assert len([t for t in workers if t.ident not in before]) == 1


def released(model, host):
    bus = Bus({p: p.shape for p in model.parameters()}) if host else None
    return beside(model, bus)


def break_off(model):
    handle = model[2].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model).backward()
    handle.remove()


@pytest.mark.parametrize("host", [False, True])
def test_a_backward_that_broke_off_is_told_as_that_with_the_way_on(host):
    model = chain()
    optimizer = released(model, host)
    break_off(model)
    with pytest.raises(RuntimeError, match=r"raised .* after 3 of 6 parameters .*zero_grad\(\)"):
        forward(model).backward()
    optimizer.zero_grad()
    for _ in range(2):
        before = [p.clone() for p in model.parameters()]
        forward(model).backward()
        optimizer.step()
        assert not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("host", [False, True])
def test_zero_grad_after_a_backward_that_broke_off_ends_the_step(host):
    model = chain()
    optimizer = released(model, host)
    forward(model).backward()
    optimizer.zero_grad()  # nothing broke off: what was applied is a step that has not ended
    with pytest.raises(RuntimeError, match="second gradient"):
        run(model, optimizer, 1)  # on the host its step raises
    optimizer.step()
    break_off(model)
    optimizer.zero_grad()
    forward(model).backward()
    optimizer.step()


def test_a_backward_inside_a_backward_is_none_that_broke_off():
    """Reentrant checkpointing: the gradients of the inner one come while the outer one runs."""
    model = chain()
    optimizer = beside(model)

    def checkpointed(x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.float().square().sum()

    for _ in range(2):
        checkpointed(torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True)).backward()
        assert not optimizer.backward.broke_off
        optimizer.step()


CUT = {
    "unbind": lambda w: w.unbind(),
    "chunk": lambda w: w.chunk(2),
    "views": lambda w: [w.view(-1), w],
}


@pytest.mark.parametrize("how", CUT)
def test_parameters_cut_from_one_tensor_are_refused_before_anything_changes(how):
    whole = torch.randn(3, 8)
    model = nn.Module()
    model.parts = nn.ParameterList([nn.Parameter(x) for x in CUT[how](whole)])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"views of one tensor .* gradients=keep"):
        memtrain.wrap(model, optimizer, ["preset=all_four", "weights=keep"])
    with pytest.raises(ValueError, match="views of one tensor"):
        ReleaseGradients(AdamW4bit(model.parameters()))
    assert type(optimizer.step(lambda: model.parts[0].sum())) is torch.Tensor  # not taken over


def test_parameters_of_one_storage_that_count_their_own_changes_are_taken():
    whole = torch.randn(3, 8)
    params = [nn.Parameter(torch.empty(0)) for _ in range(3)]
    for param, part in zip(params, whole, strict=True):
        param.data = part
    optimizer = ReleaseGradients(AdamW4bit(params, lr=0.1, weight_decay=0.0))
    (params[0] * params[1] * params[2]).sum().backward()
    optimizer.step()
    assert not torch.equal(whole, torch.zeros(3, 8))


class AdaLoraModel(nn.Linear):
    """Stands for PEFT's."""


def test_adalora_is_refused_by_name():
    model = nn.Sequential(AdaLoraModel(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"AdaLoRA .* gradients=keep"):
        memtrain.wrap(model, optimizer, ["preset=all_four"])
    memtrain.wrap(model, optimizer, ["preset=all_four", "gradients=keep"])

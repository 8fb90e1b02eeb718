"""Released gradients beside streams, threads, and errors: weights are never read half stepped."""

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.optim import AdamW4bit
from memtrain.optim.wrappers.host_copies import IN_FLIGHT, HostCopies
from memtrain.optim.wrappers.host_states import HostStates
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import SplitWeights


class Bus(HostCopies):
    """A device that works beside the host: a copy back is there when the device has joined it."""

    beside = True

    def __init__(self, names):
        self.names, self.log, self.under_way, self.most = names, [], [], 0
        self.free = dict.fromkeys(names.values(), None)  # name -> what its landing waits for
        self.down = self.up = 0

    def to_host(self, x):
        self.log.append(("sent", x.shape))
        self.down += x.nbytes
        self.most = max(self.most, self.count("sent") - self.count("stepped"))
        return x.clone(), x.shape

    def wait(self, started):
        if self.free.get(started):
            assert self.free[started].wait(20)

    def to_device(self, value, param):
        self.log.append(("stepped", param.shape))
        self.up += value.nbytes
        self.under_way.append((param, value))

    def join(self):
        self.log.append(("joined", None))
        while self.under_way:
            param, value = self.under_way.pop()
            param.data.copy_(value)

    def count(self, what):
        return [name for name, _ in self.log].count(what)


def chain(depth=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32 + k, 33 + k, bias=False) for k in range(depth)])


def beside(model, bus=None, **options):
    def build(compressed):
        return ReleaseGradients(SplitWeights(compressed, "bf16+8"), **options)

    compressed = AdamW4bit(model.parameters(), lr=1e-2, min_elements=0)
    return HostStates(compressed, build, copies=lambda p: bus) if bus else build(compressed)


def run(model, optimizer, steps, passes=1):
    for step in range(steps):
        for _ in range(passes):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            model(x.to(model[0].weight.dtype)).float().square().sum().backward()
        optimizer.step()


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
def test_a_backward_that_broke_off_is_reported_with_the_remedy(host):
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


@pytest.mark.parametrize("passes", [1, 2])
def test_steps_run_beside_the_backward_and_order_is_kept(passes):
    model, plain = chain(), chain()
    bus = Bus({p: p.shape for p in model.parameters()})
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: bus.log.append(("gradient", p.shape)))
    optimizer = beside(model, bus, accumulate=passes)
    run(model, optimizer, 3, passes)
    run(plain, beside(plain, accumulate=passes), 3, passes)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    numel = sum(p.numel() for p in model.parameters())
    assert (bus.down, bus.up) == (3 * passes * 2 * numel, 3 * 2 * numel)  # bytes: 2 each way
    main = [one for one in bus.log if one[0] != "stepped"]
    shapes = [p.shape for p in reversed(list(model.parameters()))]
    backward = [(what, shape) for shape in shapes for what in ("gradient", "sent")]
    joined = ("joined", None)  # at the end of each backward, and of the step
    assert main == 3 * [*passes * [*backward, joined], joined]  # each goes over as it comes
    for own in range(3):
        ends = [k for k, (what, _) in enumerate(bus.log) if what == "joined"][passes :: passes + 1]
        stepped = bus.log[ends[own - 1] if own else 0 : ends[own]]
        assert [shape for what, shape in stepped if what == "stepped"] == shapes


def test_a_step_overlaps_the_gradients_that_follow():
    """The first gradient lands after the second came, and is stepped before the last comes."""
    model = chain(3 * IN_FLIGHT)
    params = list(reversed(list(model.parameters())))
    bus = Bus({p: p.shape for p in params})
    second, first_stepped, seen = threading.Event(), threading.Event(), []
    bus.free[params[0].shape] = second
    params[1].register_post_accumulate_grad_hook(lambda p: second.set())
    params[-1].register_post_accumulate_grad_hook(lambda p: seen.append(first_stepped.wait(20)))
    send = bus.to_device
    bus.to_device = lambda value, param: (send(value, param), first_stepped.set())
    run(model, beside(model, bus), 1)
    assert seen == [True]
    assert 0 < bus.most <= IN_FLIGHT  # a backward waits for a slower host


def test_a_weight_whose_journey_broke_off_is_sent_again():
    model, plain = chain(), chain()
    bus = Bus({p: p.shape for p in model.parameters()})
    optimizer = HostStates(AdamW4bit(model.parameters()), copies=lambda p: bus)
    whole = bus.to_host

    def broken(x):
        if x.shape == model[-1].weight.shape:
            raise MemoryError
        return whole(x)

    with torch.no_grad():
        for each in (model, plain):
            each[0].weight.mul_(0.5)
    model(torch.ones(4, 32)).sum().backward()
    bus.to_host = broken
    with pytest.raises(MemoryError):
        optimizer.step()
    bus.to_host = whole
    optimizer.zero_grad()
    run(model, optimizer, 1)
    run(plain, AdamW4bit(plain.parameters()), 1)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_backward_that_breaks_off_in_a_step_is_waited_for_and_forgotten():
    model = chain()
    bus = Bus({p: p.shape for p in model.parameters()})
    optimizer = beside(model, bus)
    handle = model[2].weight.register_hook(lambda grad: 1 / 0)

    def closure():
        model(torch.ones(4, 32).bfloat16()).float().square().sum().backward()

    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert bus.count("stepped") == 3
    assert not bus.under_way
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    optimizer.param_groups[0]["lr"] = 0.1
    before = [p.clone() for p in model.parameters()]
    optimizer.step(closure)
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_refused_option_of_released_gradients_can_be_fixed():
    model, plain = chain(), chain()
    bus = Bus({p: p.shape for p in model.parameters()})
    optimizer, other = beside(model, bus), beside(plain)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"learning rate: -1\.0"):
        run(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 1e-2
    run(model, optimizer, 2)
    run(plain, other, 2)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_changed_after_the_backward_are_refused(passes):
    model, scaler = chain(), torch.amp.GradScaler("cpu")
    optimizer = beside(model, Bus({p: p.shape for p in model.parameters()}), accumulate=passes)
    for _ in range(passes):
        assert all(p.grad is None for p in model.parameters())
        model(torch.ones(4, 32).bfloat16()).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="changed between backward and step"):
        optimizer.step()
    scaler.scale(model(torch.ones(4, 32).bfloat16()).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler must see all gradients"):
        scaler.step(optimizer)


def test_gradients_that_two_threads_bring_are_applied_one_at_a_time(monkeypatch):
    """Autograd has a thread for each device, DDP's all-reduces end in threads of their backend."""
    inside, most = [], []

    def step_targets(released, targets):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)  # another thread runs
        applied(released, targets)
        inside.pop()

    applied = ReleaseGradients.step_targets
    monkeypatch.setattr(ReleaseGradients, "step_targets", step_targets)
    params = [nn.Parameter(torch.ones(65, 64)) for _ in range(10)]
    inner = AdamW4bit(params, lr=0.1, weight_decay=0.0)
    optimizer, errors = copy.deepcopy(ReleaseGradients(inner)), []
    params = optimizer.param_groups[0]["params"]

    def run(own):
        try:
            sum(p.sum() for p in own).backward()
        except Exception as error:  # noqa: BLE001 (any fails the test, in its thread)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(params[k::2],)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    assert not errors
    assert most == [1] * 10
    assert all(torch.all(p < 1) for p in params)
    assert [len(group["params"]) for group in optimizer.inner.param_groups] == [10]

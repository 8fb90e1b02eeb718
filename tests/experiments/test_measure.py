import pytest
import torch
from torch import nn

from memtrain.audit.live_storages import storage_nbytes
from memtrain.compressors import Key
from memtrain.experiments.data import build_source
from memtrain.experiments.loop import Run, is_due, pick_device
from memtrain.experiments.measure import Bytes, measure_states, state_tensors


def _stepped(optimizer_class, **options):
    model = nn.Linear(10, 5)
    optimizer = optimizer_class(model.parameters(), **options)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return optimizer


def test_adamw_states_by_hand():
    optimizer = _stepped(torch.optim.AdamW)
    # two moments of 55 floats, and a step counter of one float for each of two parameters
    assert measure_states(optimizer) == 4 * (2 * 55 + 2)


def test_sgd_without_momentum_holds_nothing():
    assert measure_states(_stepped(torch.optim.SGD, lr=0.1)) == 0


def test_bytes_hidden_outside_state_count():
    optimizer = _stepped(torch.optim.SGD, lr=0.1)
    optimizer.buffers = [{"codes": (torch.zeros(3), torch.zeros(4))}]
    optimizer.inner = _stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    inner = 55 * 4 + 55 * 4  # its momentum, and its parameters, which are not the outer one's
    assert measure_states(optimizer) == 7 * 4 + inner
    optimizer.loop = optimizer.buffers  # seen twice, and a cycle
    optimizer.buffers.append(optimizer.buffers)
    assert len(state_tensors(optimizer)) == len({id(t) for t in state_tensors(optimizer)})


def test_views_of_states_count_once():
    optimizer = _stepped(torch.optim.SGD, lr=0.1)
    whole = torch.zeros(100)
    optimizer.state["x"] = {"a": whole[:50], "b": whole[50:], "key": Key(seed=1)}
    assert measure_states(optimizer) == 400


def test_bytes_highest_and_total():
    both = Bytes(weights=1, saved=5, peak=3).highest(Bytes(weights=2, states=4))
    assert both == Bytes(weights=2, saved=5, states=4, peak=3)
    assert both.total == 11


def test_counting_bytes_changes_no_arithmetic(smoke):
    results = []
    for every in (0, 1):
        config = smoke(f"training.meter_every={every}", "model.dropout=0.1")
        run = Run("plain", config, build_source(config.data, config.seed))
        losses = [run.train_step().loss for _ in range(4)]
        results.append((losses, run.model.state_dict(), run.bytes))
    (plain, weights, none), (counted, same, found) = results
    assert plain == counted
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert none == Bytes()
    parameters = sum(p.numel() for p in run.model.parameters())
    assert found.weights == found.gradients == 4 * parameters
    assert found.states == 8 * parameters + 4 * len(list(run.model.parameters()))
    assert found.peak > found.weights + found.states + found.saved
    assert found.weights == storage_nbytes(run.model.parameters())


def test_counted_steps_are_not_timed(smoke):
    config = smoke("training.meter_every=3")
    run = Run("plain", config, build_source(config.data, config.seed))
    timed = [run.train_step().seconds is not None for _ in range(6)]
    assert timed == [True, False, True, True, False, True]


def test_saved_activations_of_a_known_network(smoke, monkeypatch):
    config = smoke("training.autocast=false")
    run = Run("plain", config, build_source(config.data, config.seed))
    run.model = nn.Embedding(256, 256)  # saves its index, which is older; then the log-softmax
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _ in range(2):
        run.train_step()
    tokens = config.training.batch * config.data["sequence"]
    assert run.bytes.saved == tokens * 256 * 4 + 4  # and the loss's total weight


def test_autocast_saves_less(smoke):
    saved = []
    for autocast in ("true", "false"):
        config = smoke(f"training.autocast={autocast}")
        run = Run("plain", config, build_source(config.data, config.seed))
        for _ in range(2):
            run.train_step()
        saved.append(run.bytes.saved)
    assert saved[0] < saved[1]


def test_infinite_loss_stops_the_run(smoke):
    config = smoke("optimizer.lr=1e30", "training.warmup=0", "training.clip=0")
    run = Run("plain", config, build_source(config.data, config.seed))
    run.train_step()
    with pytest.raises(FloatingPointError, match=r"plain: the loss is (nan|inf) at step 2"):
        run.train_step()


def test_periods_and_devices():
    assert [step for step in range(7) if is_due(step, 3)] == [0, 3, 6]
    assert not is_due(0, 0)
    assert pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert pick_device("auto") == torch.device("cpu")
        with pytest.raises(ValueError, match="sees no CUDA device"):
            pick_device("cuda")

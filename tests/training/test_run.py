import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain import api
from memtrain.audit.live_storages import storage_nbytes
from memtrain.training.data import build_source
from memtrain.training.run import BYTES, Run, is_due, pick_device


def made(config):
    return Run("plain", config, build_source(config.data, config.seed))


def test_counting_bytes_changes_no_arithmetic(smoke):
    results = []
    for every in (0, 1):
        run = made(smoke(f"training.meter_every={every}", "model.dropout=0.1"))
        losses = [run.train_step().loss for _ in range(4)]
        results.append((losses, run.model.state_dict(), run.bytes))
    (plain, weights, none), (counted, same, found) = results
    assert plain == counted
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert none == dict.fromkeys(BYTES, 0)
    parameters = sum(p.numel() for p in run.model.parameters())
    assert found["weights"] == found["gradients"] == 4 * parameters
    assert found["states"] == 8 * parameters + 4 * len(list(run.model.parameters()))
    assert found["peak"] > found["weights"] + found["states"] + found["saved"]
    assert found["weights"] == storage_nbytes(run.model.parameters())
    assert run.kept == sum(found.values()) - found["peak"]


def test_the_highest_bytes_are_kept(smoke, monkeypatch):
    run = made(smoke("training.meter_every=1"))
    sizes = iter([2, 7, 1, 1, 3, 4])  # gradients, weights and states of a step, then of the next
    monkeypatch.setattr("memtrain.training.run.storage_nbytes", lambda tensors: next(sizes))
    for _ in range(2):
        run.train_step()
    assert [run.bytes[name] for name in ("gradients", "weights", "states")] == [2, 7, 4]


def test_counted_steps_are_not_timed(smoke):
    run = made(smoke("training.meter_every=3"))
    timed = [run.train_step().seconds is not None for _ in range(6)]
    assert timed == [True, False, True, True, False, True]


def test_saved_activations_of_a_known_network(smoke, monkeypatch):
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(256, 256)

        def forward(self, input_ids, labels):
            return F.cross_entropy(self.table(input_ids).flatten(0, 1), input_ids.flatten())

    config = smoke("training.autocast=false")
    run = made(config)
    run.model = Bigram()  # saves its index, which is older; then the log-softmax
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _ in range(2):
        run.train_step()
    tokens = config.training.batch * config.data["sequence"]
    assert run.bytes["saved"] == tokens * 256 * 4 + 4  # and the loss's total weight


def test_autocast_saves_less(smoke):
    saved = []
    for autocast in ("true", "false"):
        run = made(smoke(f"training.autocast={autocast}"))
        for _ in range(2):
            run.train_step()
        saved.append(run.bytes["saved"])
    assert saved[0] < saved[1]


def test_infinite_loss_stops_the_run(smoke):
    run = made(smoke("optimizer.lr=1e30", "training.warmup=0", "training.clip=0"))
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


@pytest.mark.filterwarnings("ignore:the saved activations' bits")
def test_a_run_measures_and_resumes(smoke):
    config = smoke("preset=gact4", "activations.adapt_interval=2", "data.sequence=32")
    source = build_source(config.data, config.seed)
    run = Run("wrapped", config, source)
    for _ in range(2):
        run.train_step()
    bits = api.plan_of(run.model).bits
    assert bits.calls == 2
    assert len(set(bits.widths.values())) > 1
    other = Run("wrapped", config, source)
    other.load_state(copy.deepcopy(run.state()))
    assert [other.train_step().loss for _ in range(2)] == [run.train_step().loss for _ in range(2)]

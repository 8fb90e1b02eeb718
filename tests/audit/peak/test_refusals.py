"""What cannot be predicted is said, and can be measured."""

import logging
import threading

import pytest
import torch
from torch import nn

from memtrain import audit, wrap
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import explain_fake_errors, predict


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def audited(model, optimizer, batch):
    return audit(model, batch, optimizer=optimizer)


class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


class Selecting(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[(y.detach() > 0).nonzero()[:, 0]]


class Returning(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(x.numpy().sum())


@pytest.mark.parametrize(
    ("kind", "match"),
    [(Branching, "_local_scalar_dense"), (Selecting, "nonzero"), (Returning, "numpy")],
)
def test_control_flow_that_depends_on_data_is_said_and_can_be_measured(kind, match):
    model = kind(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for run in (predict, audited):
        with pytest.raises(ValueError, match=rf"{kind.__name__} .*{match}.*measure a real step"):
            run(model, optimizer, torch.ones(2, 8))
    assert measure(model, optimizer, torch.ones(2, 8), "balanced").peak.nbytes > 288


@torch.library.custom_op("memtrain_tests::strict", mutates_args=())
def strict(x: torch.Tensor) -> torch.Tensor:
    """An op that runs in every dtype with data, but has a fake form in bfloat16 only."""
    return x.clone()


@strict.register_fake
def _(x):
    torch._check(x.dtype == torch.bfloat16, lambda: f"wants bfloat16, not {x.dtype}")
    return torch.empty_like(x)


strict.register_autograd(lambda ctx, grad: grad)


class Strict(nn.Module):
    """A model that runs it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x):
        return strict(x @ self.weight).square()


def test_an_op_that_fails_on_fake_tensors_only_is_named_without_a_traceback(caplog):
    model, x = Strict(), torch.ones(8, 16)
    optimizer = torch.optim.SGD(model.parameters())
    for run in (predict, audited):
        with pytest.raises(
            ValueError, match=r"Strict runs memtrain_tests\.strict.*with data: measure"
        ):
            run(model, optimizer, x)
    assert not caplog.records
    assert measure(model, optimizer, x, "balanced").peak.nbytes > 1024


def test_other_threads_log_what_they_do_on_fake_tensors_meanwhile_and_after(caplog):
    log, model = logging.getLogger("torch._subclasses.fake_tensor"), mlp()

    def predicting():
        with explain_fake_errors(model):
            log.error("ours")
            inside.set()
            left.wait(60)

    inside, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=predicting)
    with explain_fake_errors(model):
        thread.start()
        inside.wait(60)
        log.error("ours")
    log.error("meanwhile")
    left.set()
    thread.join()
    log.error("after")
    assert caplog.messages == ["meanwhile", "after"]


def test_a_measured_audit_reports_all_but_what_needs_fake_tensors():
    model = Branching(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    report = audit(
        model, torch.ones(2, 64), "balanced", optimizer=optimizer, peak=True, measure=True
    )
    totals = report.totals()
    assert totals["weights"].plain == totals["gradients"].plain == 65 * 64 * 4
    assert totals["optimizer states"].plain == 2 * 65 * 64 * 4 + 8
    assert "_local_scalar_dense" in totals["saved activations"].unknown
    assert report.timeline is None
    assert report.measured is not None
    assert report.planned_measured is not None
    assert report.measured.peak.nbytes > totals["total"].plain
    plain, batch = mlp(), torch.ones(2, 64)
    lbfgs = torch.optim.LBFGS(plain.parameters())
    report = audit(plain, batch, "activations_only", optimizer=lbfgs, peak=True, measure=True)
    assert report.timeline is None
    assert report.measured is not None


def test_a_wrapped_model_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    model, optimizer = wrap(model, optimizer, "activations_only")
    for run in (predict, measure):
        with pytest.raises(ValueError, match="wrapped already"):
            run(model, optimizer, torch.ones(2, 64))


def test_batches_without_tensors_and_outputs_without_gradients_are_refused():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for batch in ({"text": ["a", "b"]}, ["a"], 3):
        for run in (predict, measure, audited):
            with pytest.raises(TypeError, match="allowed: a tensor, a tuple"):
                run(model, optimizer, batch)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(TypeError, match="without a tensor to differentiate"):
        predict(frozen, torch.optim.SGD(frozen.parameters()), torch.ones(2, 8))

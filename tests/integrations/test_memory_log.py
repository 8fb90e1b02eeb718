"""MemoryLog in a plain loop, under transformers' Trainer and under Lightning."""

import copy
import sys

import pytest
import torch
from torch import nn

import memtrain
from memtrain.integrations.memory_log import MemoryLog
from memtrain.optim.state_report import state_bytes

KINDS = {"peak", "predicted_peak", "weights", "gradients", "states", "activations"}
NAMES = {f"memtrain/{kind}" for kind in KINDS}


def test_a_plain_loop_gets_the_bytes_of_each_kind():
    model, x = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8)), torch.ones(64, 256)
    plain = copy.deepcopy(model)
    predicted = memtrain.estimate(model, x, "balanced").peak.nbytes
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "balanced")
    log = MemoryLog(predicted)
    model(x).sum().backward()
    optimizer.step()
    found = log.measure(model, optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    assert found.keys() == NAMES
    assert found["memtrain/weights"] == found["memtrain/gradients"] == weights
    assert found["memtrain/states"] == state_bytes(optimizer)
    assert 0 < found["memtrain/activations"] < 64 * (256 + 512 + 512) * 4 / 4
    assert found["memtrain/predicted_peak"] == predicted
    optimizer.zero_grad()
    assert log.measure(model)["memtrain/gradients"] == 0
    assert log.measure(plain).keys() == NAMES - {"memtrain/states", "memtrain/activations"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows reports no peak")
def test_the_peak_on_a_host_is_that_of_the_process():
    held = torch.ones(2**26)  # 256 MiB
    assert MemoryLog().measure(nn.Linear(4, 4))["memtrain/peak"] > held.nbytes


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_trainer_logs_them_with_its_own(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from memtrain.integrations.transformers import memtrain_trainer

    seen = {}

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.update(logs)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def forward(self, x, labels=None):
            return {"loss": (self.layer(x) - labels).square().mean()}

    rows = [{"x": torch.ones(128), "labels": torch.zeros(128)} for _ in range(16)]
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=8, save_strategy="no",
    )  # fmt: skip
    cls = memtrain_trainer(transformers.Trainer, "balanced")
    trainer = cls(model=Model(), args=args, train_dataset=rows, callbacks=[Reporter()])
    MemoryLog(123).follow(trainer)
    trainer.train()
    assert seen.keys() > NAMES
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["memtrain/predicted_peak"] for row in logged] == [123, 123]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_lightning_logs_them_to_its_logger(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from memtrain.integrations.lightning import memtrain_callback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[memtrain_callback("balanced"), MemoryLog(123).callback()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(16, 128), batch_size=8))
    assert trainer.callback_metrics.keys() >= NAMES
    assert trainer.callback_metrics["memtrain/states"] > 0

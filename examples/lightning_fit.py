"""Lightning's Trainer: `python examples/lightning_fit.py`."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import STEPS, batch, llama, report, tokens

from memtrain.integrations.lightning import memtrain_callback  # line 1


class Module(LightningModule):
    """Knows nothing of memtrain."""

    def __init__(self):
        super().__init__()
        self.model, self.losses = llama(), []

    def training_step(self, *_):
        """A step; of the step's own number, for Lightning resumes a plain DataLoader elsewhere."""
        first = 8 * self.global_step
        loss = self.model(**batch(first, first + 8)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        """As ever."""
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def run(preset, folder, resume, cls=Module):
    """Losses of each step, and the model."""
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)
    callbacks = [saves, *([memtrain_callback(preset)] if preset else [])]  # line 2
    module = cls()
    trainer = Trainer(
        max_steps=STEPS, gradient_clip_val=1.0, accelerator="cpu",
        callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(tokens(), batch_size=8)
    trainer.fit(module, data, ckpt_path=f"{folder}/step={STEPS // 2}.ckpt" if resume else None)
    return module.losses, module.model


if __name__ == "__main__":
    report(2, ["lightning"], run)

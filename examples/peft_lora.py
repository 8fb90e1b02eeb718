"""PEFT: LoRA under the Trainer: `python examples/peft_lora.py`."""

import tempfile

from peft import LoraConfig, get_peft_model
from tiny import STEPS, llama, report, tokens
from transformers import Trainer, TrainingArguments

from memtrain.integrations.transformers import memtrain_trainer  # line 1


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    cls = memtrain_trainer(Trainer, preset) if preset else Trainer  # line 2
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_steps=STEPS // 2, report_to=[], use_cpu=True,
        disable_tqdm=True, max_grad_norm=1.0, dataloader_pin_memory=False,
    )  # fmt: skip
    lora = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    trainer = cls(model=lora, args=args, train_dataset=tokens())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[STEPS // 2 :] if resume else losses, trainer.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report(2, ["peft", "transformers", "accelerate"], run, folder, ["balanced", "lora"])

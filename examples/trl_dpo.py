"""TRL's DPOTrainer: `python examples/trl_dpo.py`."""

import tempfile

from datasets import Dataset
from tiny import STEPS, llama, report, tokens
from trl import DPOConfig, DPOTrainer
from trl_sft import tokenizer

from memtrain.integrations.transformers import memtrain_trainer  # line 1


def pairs():
    """Prompts, an answer that counts on, and one that counts back."""
    rows = [row["input_ids"].tolist() for row in tokens()]
    texts = [[f"<{token}>" for token in row] for row in rows]
    return Dataset.from_list([
        {
            "prompt": "".join(text[:8]),
            "chosen": "".join(text[8:32]),
            "rejected": "".join(text[32:8:-1]),
        }
        for text in texts
    ])  # fmt: skip


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    cls = memtrain_trainer(DPOTrainer, preset) if preset else DPOTrainer  # line 2
    args = DPOConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_steps=STEPS // 2, report_to=[], use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, bf16=False, max_length=64,
        activation_checkpointing=False,  # line 3: on by default; the plan compresses instead
    )  # fmt: skip
    trainer = cls(
        model=llama(), ref_model=llama(), args=args,
        train_dataset=pairs(), processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[STEPS // 2 :] if resume else losses, trainer.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report(3, ["trl", "transformers", "accelerate"], run, folder)

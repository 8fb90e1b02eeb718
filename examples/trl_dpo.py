"""TRL's DPOTrainer: `python examples/trl_dpo.py`."""

from datasets import Dataset
from tiny import arguments, llama, report, tokens, trained
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
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=False,
        max_length=64, **arguments(),
        activation_checkpointing=False,  # line 3: on by default; the plan compresses instead
    )  # fmt: skip
    trainer = cls(
        model=llama(), ref_model=llama(), args=args,
        train_dataset=pairs(), processing_class=tokenizer(),
    )  # fmt: skip
    return trained(trainer, resume)


if __name__ == "__main__":
    report(3, ["trl", "transformers", "accelerate"], run)

"""transformers' Trainer with torch_compile=True: `python examples/transformers_compile.py`."""

from tiny import arguments, compiled_bytes, llama, report, tokens, trained
from transformers import Trainer, TrainingArguments

from memtrain.integrations.transformers import memtrain_trainer  # line 1


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    cls = memtrain_trainer(Trainer, preset) if preset else Trainer  # line 2
    args = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1.0,
        torch_compile=True, **arguments(),
    )  # fmt: skip
    return trained(cls(model=llama(), args=args, train_dataset=tokens()), resume)


if __name__ == "__main__":
    report(2, ["transformers", "accelerate"], run, saved=compiled_bytes)

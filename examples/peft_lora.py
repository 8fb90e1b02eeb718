"""PEFT: LoRA under the Trainer: `python examples/peft_lora.py`."""

from peft import LoraConfig, get_peft_model
from tiny import arguments, llama, report, tokens, trained
from transformers import Trainer, TrainingArguments

from memtrain.integrations.transformers import memtrain_trainer  # line 1


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    cls = memtrain_trainer(Trainer, preset) if preset else Trainer  # line 2
    args = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1.0,
        **arguments(1e-2),
    )  # fmt: skip
    lora = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    return trained(cls(model=lora, args=args, train_dataset=tokens()), resume)


if __name__ == "__main__":
    report(2, ["peft", "transformers", "accelerate"], run, ["balanced", "lora"])

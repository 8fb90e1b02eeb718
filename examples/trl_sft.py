"""TRL's SFTTrainer: `python examples/trl_sft.py`."""

import tempfile

from datasets import Dataset
from tiny import STEPS, llama, report, tokens
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from memtrain.integrations.transformers import memtrain_trainer  # line 1


def tokenizer():
    """One token a byte; TRL asks for one, though the data has its tokens already."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"<{k}>": k for k in range(256)}
    whole = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    whole.pre_tokenizer = pre_tokenizers.Split(">", "merged_with_previous")
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<0>", eos_token="<1>")


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    cls = memtrain_trainer(SFTTrainer, preset) if preset else SFTTrainer  # line 2
    args = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_steps=STEPS // 2, report_to=[], use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, bf16=False, max_length=64,
        activation_checkpointing=False,  # line 3: on by default; the plan compresses instead
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in tokens()])
    trainer = cls(model=llama(), args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[STEPS // 2 :] if resume else losses, trainer.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report(3, ["trl", "transformers", "accelerate"], run, folder)

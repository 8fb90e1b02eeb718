"""TRL's SFTTrainer: `python examples/trl_sft.py`."""

from datasets import Dataset
from tiny import arguments, llama, report, tokens, trained
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
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=False,
        max_length=64, **arguments(),
        activation_checkpointing=False,  # line 3: on by default; the plan compresses instead
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in tokens()])
    trainer = cls(model=llama(), args=args, train_dataset=data, processing_class=tokenizer())
    return trained(trainer, resume)


if __name__ == "__main__":
    report(3, ["trl", "transformers", "accelerate"], run)

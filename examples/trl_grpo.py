"""TRL's GRPOTrainer: `python examples/trl_grpo.py`."""

from datasets import Dataset
from tiny import arguments, llama, report, trained
from trl import GRPOConfig, GRPOTrainer
from trl_sft import tokenizer

from memtrain.integrations.transformers import memtrain_trainer  # line 1


def small_tokens(completion_ids, **_):
    """The reward: the share of an answer's tokens below 128."""
    return [sum(token < 128 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def run(preset, folder, resume):
    """Of each step the reward's negative, which falls, and the model."""
    cls = memtrain_trainer(GRPOTrainer, preset) if preset else GRPOTrainer  # line 2
    args = GRPOConfig(
        folder, per_device_train_batch_size=64, num_generations=16, max_completion_length=32,
        bf16=False, **arguments(1e-2),
        activation_checkpointing=False,  # line 3: on by default; the plan compresses instead
    )  # fmt: skip
    prompts = ["".join(f"<{(7 * k + i) % 256}>" for i in range(8)) for k in range(64)]
    trainer = cls(
        model=llama(), reward_funcs=small_tokens, args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer(),
    )  # fmt: skip
    rewards, model = trained(trainer, resume, "reward")
    return [-reward for reward in rewards], model


if __name__ == "__main__":
    report(3, ["trl", "transformers", "accelerate"], run)

"""transformers' Trainer on FSDP2: `torchrun --nproc_per_node 2 examples/transformers_fsdp.py`."""

from accelerate import FullyShardedDataParallelPlugin
from accelerate_fsdp import shard_on_cpu
from tiny import arguments, llama, report, tokens, trained
from transformers import Trainer, TrainingArguments

from memtrain.integrations.transformers import memtrain_trainer  # line 1


class Sharding(Trainer):
    """A Trainer that shards on a CPU too."""

    def create_accelerator_and_postprocess(self):
        """As ever, then FSDP2."""
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        shard_on_cpu(self.accelerator, plugin)
        self.is_fsdp_enabled = True


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    cls = memtrain_trainer(Sharding, preset) if preset else Sharding  # line 2
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1.0,
        fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        **arguments(),
    )  # fmt: skip
    return trained(cls(model=llama(), args=args, train_dataset=tokens()), resume)


if __name__ == "__main__":
    report(2, ["transformers", "accelerate"], run)

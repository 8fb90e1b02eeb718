"""accelerate's FSDP2: `torchrun --nproc_per_node 2 examples/accelerate_fsdp.py`."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from tiny import STEPS, batch, llama, report

from memtrain.integrations.accelerate import wrap  # line 1


def shard_on_cpu(accelerator, plugin):
    """Let FSDP2 shard on a CPU too, where accelerate would make DDP of the plugin."""
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    shard_on_cpu(accelerator, plugin)
    model = llama()
    released = preset == "all_four"
    if released:  # weights of two bytes before they are sharded, and `wrap` after it
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    if preset and not released:
        model, optimizer = wrap(accelerator, model, optimizer, preset)  # line 2
    model, optimizer = accelerator.prepare(model, optimizer)
    if released:
        model, optimizer = wrap(accelerator, model, optimizer, preset, max_norm=1.0)
    if resume:
        accelerator.load_state(folder)
    rank, world, losses = accelerator.process_index, accelerator.num_processes, []
    for k in range(STEPS // 2 if resume else 0, STEPS):
        loss = model(**batch(8 * k + rank, 8 * k + 8, world)).loss
        accelerator.backward(loss)
        if not released:  # line 3: it is clipped in backward
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if k == STEPS // 2 - 1 and not resume and preset:
            accelerator.save_state(folder)
    return losses, model


if __name__ == "__main__":
    report(3, ["accelerate"], run)

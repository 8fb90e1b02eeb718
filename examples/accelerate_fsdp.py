"""accelerate's FSDP2: `torchrun --nproc_per_node 2 examples/accelerate_fsdp.py`."""

import contextlib
import io
import sys
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from tiny import STEPS, llama, report, tokens

from memtrain.integrations.accelerate import wrap  # line 1


def accelerator_of_shards():
    """One that shards on a CPU too, where accelerate would make DDP of the plugin."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    accelerator = accelerator_of_shards()
    model = llama()
    released = preset == "all_four"
    if released:  # weights of two bytes before they are sharded, and `wrap` after it
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if preset and not released:
        model, optimizer = wrap(accelerator, model, optimizer, preset)  # line 2
    model, optimizer = accelerator.prepare(model, optimizer)
    if released:
        model, optimizer = wrap(accelerator, model, optimizer, preset, max_norm=1.0)
    if resume:
        accelerator.load_state(folder)
    rows, losses = tokens(8 * STEPS), []
    own = slice(accelerator.process_index, None, accelerator.num_processes)
    for k in range(STEPS // 2 if resume else 0, STEPS):
        ids = torch.stack([row["input_ids"] for row in rows[8 * k : 8 * k + 8][own]])
        loss = model(input_ids=ids, labels=ids).loss
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
    torch.distributed.init_process_group("gloo")
    given = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(given)
    with contextlib.redirect_stdout(io.StringIO() if torch.distributed.get_rank() else sys.stdout):
        report(3, ["accelerate"], run, given[0])
    torch.distributed.destroy_process_group()

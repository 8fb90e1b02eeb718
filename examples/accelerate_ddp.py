"""accelerate in two processes: `torchrun --nproc_per_node 2 examples/accelerate_ddp.py`."""

import contextlib
import io
import sys
import tempfile

import torch
from accelerate import Accelerator
from tiny import STEPS, llama, report, tokens

from memtrain.integrations.accelerate import wrap  # line 1


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if preset:
        model, optimizer = wrap(accelerator, model, optimizer, preset, max_norm=1.0)  # line 2
    released = preset == "all_four"
    model, optimizer = accelerator.prepare(model, optimizer)
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
        if k == STEPS // 2 - 1 and not resume:
            accelerator.save_state(folder)
    return losses, model


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    given = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(given)
    with contextlib.redirect_stdout(io.StringIO() if torch.distributed.get_rank() else sys.stdout):
        report(3, ["accelerate"], run, given[0])
    torch.distributed.destroy_process_group()

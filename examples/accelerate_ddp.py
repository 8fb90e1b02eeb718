"""accelerate in two processes: `torchrun --nproc_per_node 2 examples/accelerate_ddp.py`."""

import torch
from accelerate import Accelerator
from tiny import STEPS, batch, llama, report

from memtrain.integrations.accelerate import wrap  # line 1


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    if preset:
        model, optimizer = wrap(accelerator, model, optimizer, preset, max_norm=1.0)  # line 2
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(folder)
    rank, world, losses = accelerator.process_index, accelerator.num_processes, []
    for k in range(STEPS // 2 if resume else 0, STEPS):
        loss = model(**batch(8 * k + rank, 8 * k + 8, world)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if k == STEPS // 2 - 1 and not resume:
            accelerator.save_state(folder)
    return losses, model


if __name__ == "__main__":
    report(2, ["accelerate"], run, ("balanced",))

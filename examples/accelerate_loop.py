"""A loop of one's own around accelerate: `python examples/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from tiny import STEPS, batch, llama, report

from memtrain.integrations.accelerate import wrap  # line 1


def run(preset, folder, resume, **options):
    """Losses of each step, and the model."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, **options)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    if preset:
        model, optimizer = wrap(accelerator, model, optimizer, preset, max_norm=1.0)  # line 2
    released = preset == "all_four"
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for k in range(STEPS if resume else 0, 2 * STEPS):
        with accelerator.accumulate(model):
            loss = model(**batch(4 * k, 4 * k + 4)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and not released:  # line 3: it is clipped in backward
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if k == STEPS - 1 and not resume:
            accelerator.save_state(folder)
    return losses, accelerator.unwrap_model(model, keep_torch_compile=False)


if __name__ == "__main__":
    report(3, ["accelerate"], run)

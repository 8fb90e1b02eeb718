"""torchtitan's optimizers, and the state that its checkpoints hold: `torchtitan_loop.py`."""

import torch.distributed.checkpoint as dcp
from tiny import STEPS, batch, llama, report
from torchtitan.components.optimizer import default_adamw

from memtrain.integrations.torchtitan import memtrain_optimizers  # line 1


def run(preset, folder, resume):
    """Losses of each step, and the model; optimizers are built as torchtitan's trainer does."""
    model, config = llama(), default_adamw(lr=5e-3)
    config.implementation = "foreach"  # "fused" is for CUDA
    if preset:
        config = memtrain_optimizers(config, preset)  # line 2
    optimizers = config.build(model_parts=[model])
    saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    if resume:
        dcp.load(saved, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizer"])
    losses = []
    for k in range(STEPS // 2 if resume else 0, STEPS):
        loss = model(**batch(8 * k, 8 * k + 8)).loss
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
        if k == STEPS // 2 - 1 and not resume:
            saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            dcp.save(saved, checkpoint_id=folder, no_dist=True)
    return losses, model


if __name__ == "__main__":
    report(2, ["torchtitan"], run)

"""diffusers: a DiT and a U-Net, whole or with adapters: `python examples/diffusers_train.py`.

`python examples/diffusers_train.py unet` and `... dit lora` train the others; adapters need peft.
"""

import sys
from pathlib import Path

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from tiny import STEPS, report

import memtrain  # line 1
from memtrain.audit.live_storages import saved_nbytes

KIND, *OPTIONS = sys.argv[1:] or ["dit"]
NOISES = DDPMScheduler()


def network():
    """A tiny U-Net with cross-attention, or a tiny DiT."""
    torch.manual_seed(0)
    if KIND == "dit":
        model = DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
            num_layers=4, sample_size=16, norm_num_groups=4, num_embeds_ada_norm=1000,
        )  # fmt: skip
    else:
        model = UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=64,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
        )  # fmt: skip
    if "lora" in OPTIONS:
        from peft import LoraConfig, inject_adapter_in_model

        # What `add_adapter` of diffusers' networks calls; the DiT has no `add_adapter`.
        config = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
        inject_adapter_in_model(config, model.requires_grad_(False))
    return model.train()


def loss_of(model, step):
    """The mean squared error of the predicted noise."""
    draw = torch.Generator().manual_seed(step)
    images, noise = torch.randn(2, 8, 4, 16, 16, generator=draw)
    times = torch.randint(1000, (8,), generator=draw)
    noisy = NOISES.add_noise(0.2 * images, noise, times)
    if KIND == "dit":
        found = model(noisy, timestep=times, class_labels=times % 10).sample
    else:
        found = model(noisy, times, torch.ones(8, 4, 64)).sample
    return (found - noise).square().mean()


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    model = network()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    if preset:
        model, optimizer = memtrain.wrap(model, optimizer, preset)  # line 2
    Path(folder).mkdir(exist_ok=True)
    file, first = Path(folder) / "half.pt", 0
    if resume:
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if preset:
            memtrain.load_state_dict(model, state["memtrain"])
        first = STEPS
    losses = []
    for step in range(first, 2 * STEPS):
        torch.manual_seed(step)  # of dropout
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == STEPS - 1 and not resume:
            own = memtrain.state_dict(model) if preset else {}
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "memtrain": own}, file)
    return losses, model


if __name__ == "__main__":
    presets = ["balanced", "lora" if "lora" in OPTIONS else "all_four"]
    report(2, ["diffusers"], run, presets, lambda model: saved_nbytes(lambda: loss_of(model, 0))[0])

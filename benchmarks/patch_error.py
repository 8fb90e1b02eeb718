"""Error per bit on real feature maps: 4x4 patches against groups at equal bytes.

    python -m benchmarks.patch_error

Trains the small residual network on scikit-learn's digits, keeps the inputs and outputs of its
3x3 convolutions of one validation batch, and compresses each map. One row per map, dtype and
method goes to `benchmarks/results/patch_error.csv`. `relative_mse` is the squared error over the
variance of the map.
"""

import csv
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

import memtrain
from memtrain.compressors import Group, Key, Patch
from memtrain.training.data import digits
from memtrain.training.networks import resnet

RESULTS = Path(__file__).parent / "results" / "patch_error.csv"
STEPS, BATCH, SCALE = 60, 64, 4  # images are enlarged to 32x32, so that maps are 32 and 16 wide


def in_tiles(x):
    """The values of each 4x4 patch side by side: what a group of 16 must see to be a patch."""
    n, c, h, w = x.shape
    return x.view(n, c, h // 4, 4, w // 4, 4).transpose(3, 4).contiguous()


def methods(rounding):
    """Name -> (compressor, how the map is read); all at 4 bits a value unless the name says so."""
    two = Group(bits=2, group_size=16, rounding=rounding)
    return {
        "patch 4x4": (Patch(rounding=rounding), None),
        "2-bit group of 4x4": (two, in_tiles),
        "2-bit group of 1x16": (two, None),
        "2-bit group of 16 channels": (two, lambda x: x.permute(0, 2, 3, 1).contiguous()),
        "3-bit group of 32": (Group(bits=3, group_size=32, rounding=rounding), None),
        "4-bit group of 256": (Group(bits=4, group_size=256, rounding=rounding), None),
        "2-bit group of 256": (Group(bits=2, group_size=256, rounding=rounding), None),
    }


def feature_maps():
    """Inputs and outputs of the trained network's convolutions on a validation batch."""
    torch.manual_seed(0)
    model, source = resnet(width=32, blocks=1), digits(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch(split, index):
        inputs, targets = source.batch(split, index, BATCH)
        return F.interpolate(inputs, scale_factor=SCALE, mode="bilinear"), targets

    for step in range(STEPS):
        inputs, targets = batch("train", step)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    maps = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d) and module.in_channels > 1:
            module.register_forward_hook(
                lambda _, inputs, output, name=name: maps.update(
                    {(name, "input"): inputs[0], (name, "output"): output}
                )
            )
    inputs, targets = batch("validation", 0)
    with torch.no_grad():
        accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    print(f"accuracy {accuracy:.3f} after {STEPS} steps")
    return {key: x.detach() for key, x in maps.items()}


def main():
    about = {
        "torch": torch.__version__,
        "memtrain": memtrain.__version__,
        "cpu": platform.machine(),
        "steps": STEPS,
    }
    rows = []
    for (name, role), original in feature_maps().items():
        for dtype in (torch.bfloat16, torch.float16):
            x = original.to(dtype)
            for rounding in ("nearest", "stochastic"):
                for method, (compressor, read) in methods(rounding).items():
                    source = read(x) if read else x
                    packed = compressor.compress(source, key=Key(seed=1))
                    error = compressor.decompress(packed).double() - source.double()
                    relative = (error.square().mean() / x.double().var()).item()
                    bits = 8 * packed.nbytes / x.numel()
                    row = {"layer": name, "map": role, "shape": "x".join(map(str, x.shape))}
                    row |= {"dtype": str(dtype).removeprefix("torch."), "rounding": rounding}
                    row |= {"method": method, "bits": round(bits, 4), "relative_mse": relative}
                    rows.append(row | about)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(f"{'map':8}{'dtype':10}{'rounding':12}{'method':28}{'bits':>7}{'relative mse':>14}")
    groups = {}
    for row in rows:
        key = (row["map"], row["dtype"], row["rounding"], row["method"])
        groups.setdefault(key, []).append(row)
    for (role, dtype, rounding, method), found in groups.items():
        mean = sum(row["relative_mse"] for row in found) / len(found)
        print(f"{role:8}{dtype:10}{rounding:12}{method:28}{found[0]['bits']:7.3f}{mean:14.5f}")


if __name__ == "__main__":
    main()

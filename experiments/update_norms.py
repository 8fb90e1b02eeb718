"""How long the updates of compressed states are, beside float32's, on the same gradients.

    python -m experiments.update_norms            seeds 0, 1 and 2 into outputs/update_norms.csv
    python -m experiments.update_norms seeds=0 output=FILE
    python -m experiments.update_norms tasks=logistic_64,digits variants=lion,lion_8bit,lion_4bit

The first variant, by default float32 AdamW, trains a task, by default `gpt_short`. At each step
every variant is given the same weights and gradients, and would change the weights so much: its
change over the first one's, in length, and the cosine between them, over all weights at once,
without weight decay. A line of the file, to which each call adds, is the mean over some steps. Of
Lion, whose changes are signs, a cosine of 1 - 2 s says that a share s of the signs is another.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.optimizer_states import VARIANTS, made
from experiments.study import descend
from experiments.tasks import TASKS

COLUMNS: tuple[str, ...] = ("task", "seed", "variant", "first_step", "last_step", "ratio", "cosine")
WINDOWS = ((1, 20), (21, 50), (51, 100), (101, 200))
"""First and last step, from 1; the rate grows in the first."""
NAMES = ("fp32", "exact_moment", "factored_4bit", "factored_2bit", "no_momentum", "fp32_beta50")


class Beside:
    """An optimizer that steps, and others that are asked what they would do in its place.

    Args:
        model: Trained by `leader`.
        leader: Steps the model.
        others: Name -> a copy of the model and its optimizer, whose weight decay is 0.
        baseline: Of `others`: what changes are measured by.
    """

    def __init__(
        self, model: nn.Module, leader: Any, others: dict[str, tuple[nn.Module, Any]], baseline: str
    ) -> None:
        self.model, self.leader, self.others, self.baseline = model, leader, others, baseline
        self.param_groups = leader.param_groups
        self.found: list[dict[str, tuple[float, float]]] = []

    def zero_grad(self) -> None:
        """The leader's."""
        self.leader.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """One step of the leader, and of each other one from the leader's weights."""
        changes = {name: self._change(*other) for name, other in self.others.items()}
        plain = changes[self.baseline]
        self.found.append(
            {
                name: (
                    (change.norm() / plain.norm()).item(),
                    (change @ plain / (change.norm() * plain.norm())).item(),
                )
                for name, change in changes.items()
            }
        )
        self.leader.step()

    def _change(self, copy: nn.Module, optimizer: Any) -> Tensor:
        pairs = list(zip(copy.parameters(), self.model.parameters(), strict=True))
        for own, param in pairs:
            own.copy_(param)
            own.grad = None if param.grad is None else param.grad.clone()
        for own, group in zip(optimizer.param_groups, self.param_groups, strict=True):
            own["lr"] = group["lr"]
        optimizer.step()
        return torch.cat([(own - param).double().reshape(-1) for own, param in pairs])


def measure(
    name: str, seed: int, names: Sequence[str] = NAMES, steps: int = 200
) -> list[dict[str, Any]]:
    """Train a task with the first variant and look at the others beside it.

    Args:
        name: Of `experiments.tasks.TASKS`.
        seed: Of the data and the weights.
        names: Of `VARIANTS`.
        steps: So many.

    Returns:
        Lines of the file.
    """
    task = TASKS[name]
    source = task.source(seed)
    models = []
    for _ in (None, *names):
        torch.manual_seed(seed)
        models.append(task.model())
    leading = VARIANTS[names[0]]
    leader = made(leading, models[0], task.lr, task.weight_decay)[1]
    others = {
        other: made(VARIANTS[other], model, task.lr, 0.0)
        for other, model in zip(names, models[1:], strict=True)
    }
    beside = Beside(models[0], leader, others, names[0])

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return source.batch("train", step, task.batch)

    descend(models[0], beside, batch, peak=task.lr * leading.rate, steps=steps)
    lines = []
    for other in names[1:]:
        for first, last in WINDOWS:
            seen = [step[other] for step in beside.found[first - 1 : last]]
            if not seen:
                continue
            ratio, cosine = (sum(values) / len(seen) for values in zip(*seen, strict=True))
            key = {"task": name, "seed": seed, "variant": other}
            where = {"first_step": first, "last_step": first + len(seen) - 1}
            lines.append({**key, **where, "ratio": f"{ratio:.4f}", "cosine": f"{cosine:.4f}"})
    return lines


def main(arguments: Sequence[str]) -> int:
    """Measure and add to the file; the exit status."""
    given = dict(item.split("=", 1) for item in arguments)
    output = Path(given.get("output", "outputs/update_norms.csv"))
    output.parent.mkdir(parents=True, exist_ok=True)
    names = given.get("variants", ",".join(NAMES)).split(",")
    with output.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        for name in given.get("tasks", "gpt_short").split(","):
            for seed in given.get("seeds", "0,1,2").split(","):
                writer.writerows(measure(name, int(seed), names))
                file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`make_plan`: from rules, or from a budget."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.plan import plan as rules
from memtrain.plan.plan import Plan
from memtrain.planner.budget import fit
from memtrain.planner.goal import Goal


def make_plan(
    model: nn.Module,
    optimizer: Optimizer,
    cfg: Any = None,
    *,
    batch: Any = None,
    budget: str | int | None = None,
    **goal: Any,
) -> Plan:
    """Decide what is done to every site, by rules or so that the peak fits a budget.

    Args:
        model: The model; not changed.
        optimizer: Its optimizer; not changed.
        cfg: Anything that `memtrain.wrap` takes. With a budget its rules do not count.
        batch: What the model is called with: settles the activation sites by a forward on fake
            tensors. Without it the first training forward of a wrapped model settles them. A
            budget needs it.
        budget: Bytes that the peak of a training step may take: `"24GiB"`. None: by rules.
        goal: With a budget: `allow`, of `quantise`, `recompute` (both by default), `release` and
            `weights`; `max_error`, in units of the preset `balanced`'s noise (1); `objective`,
            `time` (by default) or `error`; and the other fields of `memtrain.planner.Goal`.

    Returns:
        The plan; `plan.save("plan.yaml")` writes it.

    Raises:
        ValueError: For a config that is not valid, a rule of the user's or a plan file whose
            module, site or parameter does not exist, a budget that is malformed, comes without
            a batch, or that nothing fits (`memtrain.planner.DoesNotFit`).
        TypeError: For values of the wrong type.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> plan = make_plan(model, optimizer, batch=torch.randn(256, 64), budget="2MB")
        >>> plan.config.activations.sites["1 / gelu / input"]["name"]
        'derivative'
    """
    if budget is None:
        if goal:
            raise ValueError(f"{', '.join(goal)} without a budget; allowed: with budget=")
        return rules.make_plan(model, optimizer, cfg, batch=batch)
    if batch is None:
        raise ValueError(f"budget={budget!r} needs batch=: what the model is called with")
    return fit(model, optimizer, batch, budget, cfg, goal=Goal(**goal)).plan

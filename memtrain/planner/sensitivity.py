"""How much of the gradient each item's compression costs: measured on a batch, or by analysis."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from memtrain.activations.intercept import Interception
from memtrain.activations.options import Options
from memtrain.activations.passes import Closure, Gradient, distance, dot, untouched
from memtrain.activations.sites import Site
from memtrain.compressors import Compressor
from memtrain.planner.candidates import Block, Candidates, Item
from memtrain.planner.levels import BALANCED, LEVELS

Errors = dict[str, dict[str, float]]
"""Item's name -> level -> the error that it brings."""


def analytic(candidates: Candidates) -> Errors:
    """Every saved tensor counts alike: its relative squared error, shared among all of them.

    Args:
        candidates: Of a model.

    Returns:
        Shares of the gradient's square.
    """
    n_sites = max(1, sum(_lossy_sites(item) for item in candidates.items))
    return {
        item.name: {level: option.error / n_sites for level, option in item.options.items()}
        for item in candidates.items
    }


def measured(
    model: nn.Module, closure: Closure, candidates: Candidates, options: Options
) -> Errors:
    """Run forward and backward with one kind of items at its lowest level, all others exact.

    Items at the same place of their blocks are a kind, and are measured together: the squared
    distance of the gradient from the exact one, as a share of its square, divided evenly. Other
    levels follow by the ratio of their analytic errors.

    Args:
        model: Real; nothing of it is changed.
        closure: Runs forward and backward on one batch.
        candidates: Of this model and batch.
        options: As of the plan.

    Returns:
        Shares of the gradient's square.
    """
    found = analytic(candidates)
    with untouched(model) as gradient:

        def run(choices: Mapping[Site, Compressor | str]) -> Gradient:
            interception = Interception(
                model,
                lambda site: choices.get(site, "kept for the measurement"),
                options=options,
                seed=0,
                settle=lambda records: None,
            )
            with interception.alone():
                return gradient(closure)

        exact = run({})
        norm = dot(exact, exact)
        for items in _kinds(candidates.blocks).values():
            lowest = {item.name: [*item.options][-1] for item in items}
            analysed = sum(found[item.name][lowest[item.name]] for item in items)
            if not analysed or not norm:
                continue
            choices = {
                site: chosen
                for item in items
                for site, chosen in item.options[lowest[item.name]].choices.items()
            }
            scale = distance(run(choices), exact) / norm / analysed
            for item in items:
                own = found[item.name]
                found[item.name] = {level: error * scale for level, error in own.items()}
    return found


def of_balanced(errors: Errors) -> float:
    """What the preset `balanced` brings: of each item the level that stands nearest above it."""
    place = {level: index for index, level in enumerate(LEVELS)}
    return sum(
        next(
            (own[level] for level in reversed(own) if place[level] <= place[BALANCED]),
            0.0,
        )
        for own in errors.values()
    )


def is_real(model: nn.Module, batch: Any) -> bool:
    """Whether a step can be run: neither the model nor the batch is fake."""
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [*model.parameters(), *given]
    return detect_fake_mode(tensors) is None and not any(x.is_meta for x in tensors)


def _lossy_sites(item: Item) -> int:
    """Sites that the lowest level rounds."""
    lowest = item.options[[*item.options][-1]]
    return len(lowest.choices) if lowest.error else 0


def _kinds(blocks: Sequence[Block]) -> dict[str, list[Item]]:
    kinds: dict[str, list[Item]] = {}
    for block in blocks:
        for item in block.items:
            name = item.name.removeprefix(block.name) if block.name else f"/{item.name}"
            kinds.setdefault(name, []).append(item)
    return kinds

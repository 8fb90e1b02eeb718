"""`memtrain-report --gradients` and `--measure`: a model with its memory, and a real batch."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memtrain.cli.models.models import Built, Request, build
from memtrain.config.sources import Config
from memtrain.gradient_quality import GradientQuality, gradient_quality


def gradients(request: Request, config: Config) -> GradientQuality:
    """Build the model with initial weights, and measure each site's gradient on random data.

    A `py:` builder's own weights and batch are used as they are.

    Args:
        request: The model and its batch.
        config: The plan.

    Returns:
        The quality of the whole plan and of each site that it compresses.

    Memory:
        A plain training step's, and five gradients.
    """
    model, _, batch = real(request, config.seed)
    return gradient_quality(model, batch, config, warn=False)


def real(request: Request, seed: int, device: str = "cpu") -> Built:
    """Build a model with initial weights, and fill its batch with random data.

    Args:
        request: The model and its batch.
        seed: Of the weights and the data.
        device: Where it lies.

    Returns:
        Model, optimizer and batch; a `py:` builder's own weights and batch as they are.

    Memory:
        The model's and the batch's; for a named model, also a forward's.
    """
    torch.manual_seed(seed)
    model, optimizer, batch = build(request, real=True)
    model.to(device)
    batch = tree_map_only(Tensor, lambda x: x.to(device), batch)
    if not request.model.startswith("py:") and isinstance(batch, dict):
        # Classes of an image model, tokens of a text model: the output says how many there are.
        with torch.no_grad():
            classes = model(**batch).logits.shape[-1]
        batch = {name: _random(x, classes) for name, x in batch.items()}
    return Built(model, optimizer, batch)


def _random(x: Tensor, classes: int) -> Tensor:
    return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, classes)

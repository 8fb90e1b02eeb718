"""`memtrain-report --gradients`: what a plan does to the gradient of one real batch."""

import torch
from torch import Tensor

from memtrain.activations.quality import GradientQuality
from memtrain.cli.models import Request, build
from memtrain.config import Config
from memtrain.quality import gradient_quality


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
    torch.manual_seed(config.seed)
    built = build(request, real=True)
    batch = built.batch
    if not request.model.startswith("py:") and isinstance(batch, dict):
        # Classes of an image model, tokens of a text model: the output says how many there are.
        with torch.no_grad():
            classes = built.model(**batch).logits.shape[-1]
        batch = {name: _random(x, classes) for name, x in batch.items()}
    return gradient_quality(built.model, batch, config)


def _random(x: Tensor, classes: int) -> Tensor:
    return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, classes)

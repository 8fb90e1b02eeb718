"""Batches of both forms: inputs beside targets, or the keyword arguments of a model with a loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.audit.peak.training_step import default_loss

Batch = tuple[Tensor, Tensor] | dict[str, Tensor]
"""`(inputs, targets)` of a model that returns logits; or what a model is called with that returns
its loss, `labels` among it: -100 where there is nothing to learn, and in causal models at the first
token, which none foretells."""
IGNORED = -100
"""The label of a token that is not learned, as in torch's cross-entropy."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch, and take its loss: the mean over what the batch has to learn.

    Args:
        model: Of logits for a pair; of an output with a `loss`, or of the loss, for a dict.
        batch: On the model's device.

    Returns:
        A scalar.

    Example:
        >>> loss_of(nn.Identity(), (torch.zeros(3, 2), torch.ones(3, dtype=torch.long))).item()
        0.6931471824645996
    """
    if isinstance(batch, dict):
        output = model(**batch)
        return output if isinstance(output, Tensor) else default_loss(output)
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def count(batch: Batch) -> int:
    """Tokens (padding left out) or images of a batch."""
    if not isinstance(batch, dict):
        return batch[1].numel()
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return batch["input_ids" if "input_ids" in batch else "labels"].numel()


def learned(batch: Batch) -> int:
    """Targets of a batch: by so many its mean loss was divided."""
    if not isinstance(batch, dict):
        return batch[1].numel()
    return int((batch["labels"] != IGNORED).sum())


def moved(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), batch)

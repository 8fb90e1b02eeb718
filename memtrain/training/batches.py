"""Batches: a pair of inputs and targets, or keyword arguments of a model that returns its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.audit.peak.training_step import default_loss

Batch = tuple[Tensor, Tensor] | dict[str, Tensor]
"""`(inputs, targets)` for a model that returns logits; or keyword arguments for a model that
returns its loss, `labels` among them: -100 where there is nothing to learn (the first token)."""
IGNORED = -100
"""The label of a token that is not learned, as in torch's cross-entropy."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch and return its loss: the mean over the targets of the batch.

    Args:
        model: Returns logits for a pair; an output with a `loss`, or the loss, for a dict.
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


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens without padding, or of labels, in a batch."""
    if not isinstance(batch, dict):
        return batch[1].numel()
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return batch["input_ids" if "input_ids" in batch else "labels"].numel()


def count_targets(batch: Batch) -> int:
    """Return the number of targets, by which the mean loss was divided."""
    if not isinstance(batch, dict):
        return batch[1].numel()
    return int((batch["labels"] != IGNORED).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), batch)

"""Batches: keyword arguments of a model that returns its loss."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memtrain.audit.peak.training_step import default_loss

Batch = dict[str, Tensor]
"""Keyword arguments of a model, `labels` among them."""
IGNORED = -100
"""The label of a token that is not learned, as in torch's cross-entropy."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch and return its loss: the output's `loss`, or the output itself."""
    output = model(**batch)
    return output if isinstance(output, Tensor) else default_loss(output)


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens without padding, or of labels, in a batch."""
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    return batch["input_ids" if "input_ids" in batch else "labels"].numel()


def count_targets(batch: Batch) -> int:
    """Return the number of targets, by which the mean loss was divided."""
    return int((batch["labels"] != IGNORED).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), batch)

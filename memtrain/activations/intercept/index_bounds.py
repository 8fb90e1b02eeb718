"""Bounds of the indices that an op saves, whatever their values."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# Ops whose index runs along the dimension that comes second; none of them takes negative ones.
_ALONG = frozenset(
    (
        "gather",
        "index_add",
        "index_copy",
        "index_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    )
)
BOUNDED = _ALONG | {"embedding"}
"""Ops whose indices have a bound that is known."""


def limit_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The size that an op's indices stay below: of a table's rows, of a dimension.

    Args:
        name: The op's, as in sites.
        args: Of the call.
        kwargs: Of the call.

    Returns:
        None where nothing is known without reading them.

    Example:
        >>> import torch
        >>> limit_of("gather", (torch.ones(4, 32), 1), {"index": torch.zeros(4, 2).long()})
        32
    """
    if name == "embedding":
        # torch.embedding takes table and indices in the other order than F.embedding.
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        table = next((x for x in given if x.is_floating_point()), None)
        return None if table is None or table.dim() != 2 else max(1, table.shape[0])
    if name not in _ALONG:
        return None
    x = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, Tensor) or not isinstance(dim, int) or x.dim() == 0:
        return None
    return max(1, x.shape[dim])

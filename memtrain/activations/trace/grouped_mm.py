"""Grouped matrix products (mixtures of experts) on fake tensors, in every dtype."""

from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._subclasses.fake_impls import op_implementations_dict


def known_to_fake_tensors() -> None:
    """Let fake tensors run the grouped products that torch runs on data; its form wants bfloat16.

    How large a product's result is depends on shapes alone: groups are rows that lie one after
    another, whatever their sizes. Where this torch names its own rule otherwise, nothing is done:
    float32 is then refused by fake tensors, as before.
    """
    rule = getattr(_meta_registrations, "_create_grouped_mm_output_tensor", None)
    if rule is None:
        return

    def grouped_mm(
        mode: Any,
        func: Any,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        with mode:  # else the result would be a real tensor, of no values
            return rule(a, b, offs, out_dtype)

    op_implementations_dict.setdefault(torch.ops.aten._grouped_mm.default, grouped_mm)

"""Whether Triton kernels may hold PTX: not where AMD's compiler or the interpreter reads them."""

from typing import Any, cast

import torch
import triton
import triton.language as tl

_RUNTIME = cast(Any, triton).knobs.runtime
PTX = tl.constexpr(torch.version.hip is None and not _RUNTIME.interpret)
"""Whether `tl.inline_asm_elementwise` takes PTX here; what is computed is the same without."""

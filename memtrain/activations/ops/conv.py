"""Convolution whose backward decompresses its input a few samples at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from memtrain.activations.ops.call import HOOKED
from memtrain.activations.ops.once import once_differentiable
from memtrain.activations.ops.spatial import per_dimension
from memtrain.activations.saved.flatten import flatten, restore
from memtrain.compressors import Compressor, Key

NAMES = (*(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3)))
_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_FORWARD[:5], "output_padding", "groups", "dilation")


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How much of an input is decompressed at once.

    Args:
        threshold: Bytes of decompressed input, at least one sample; None: the whole batch.

    Raises:
        ValueError: If the threshold is below 1.

    Example:
        >>> MicroBatches(threshold=1000).samples(torch.ones(8, 100))
        2
    """

    threshold: int | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and self.threshold < 1:
            raise ValueError(f"threshold={self.threshold}; allowed: 1 byte or more, or None")

    def samples(self, x: Tensor) -> int:
        """Samples of `x` that are decompressed at once."""
        if self.threshold is None:
            return max(1, x.shape[0])
        per_sample = x[:1].numel() * x.element_size()
        return min(max(1, self.threshold // max(1, per_sample)), max(1, x.shape[0]))


class Geometry(NamedTuple):
    """What torch.convolution takes after its tensors, in its order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


@dataclass(frozen=True, eq=False)
class Convolution:
    """A call of a convolution."""

    op: str
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    micro: MicroBatches
    tensor: str = "input"

    def accepts(self, compressor: Compressor) -> bool:
        """Any that gives back floats; hooks serve where the batch is decompressed whole."""
        floats = not isinstance(compressor, HOOKED)
        return floats and self.micro.samples(self.x) < self.x.shape[0]

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value, with a payload per micro-batch in place of x."""
        return convolution(
            self.x,
            self.weight,
            self.bias,
            self.geometry,
            micro=self.micro,
            compressor=compressor,
            key=key,
        )


def recognise(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    micro: MicroBatches = MicroBatches(),
) -> Convolution | None:
    """A batched convolution; None where `micro` is off, or `padding="same"` is uneven."""
    transposed, n = "transpose" in name, int(name[-2])
    values = dict(zip(_TRANSPOSED if transposed else _FORWARD, args, strict=False)) | dict(kwargs)
    x, weight = values.get("input"), values.get("weight")
    if micro.threshold is None or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    if x.dim() != n + 2 or x.numel() == 0:
        return None
    dilation = per_dimension(values.get("dilation", 1), n)
    padding = _padding(values.get("padding", 0), weight.shape[2:], dilation)
    if padding is None:
        return None
    stride = per_dimension(values.get("stride", 1), n)
    output_padding = per_dimension(values.get("output_padding", 0), n)
    groups = values.get("groups", 1)
    geometry = Geometry(stride, padding, dilation, transposed, output_padding, groups)
    return Convolution(name, x, weight, values.get("bias"), geometry, micro)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    *,
    micro: MicroBatches,
    compressor: Compressor,
    key: Key = Key(),  # noqa: B008 (a frozen value)
) -> Tensor:
    """`torch.convolution`, saving `x` compressed in micro-batches, which backward takes in turn.

    The value is torch's own; the weight's gradient is added up in float32 over the micro-batches.

    Args:
        x: Float, [N, C, ...].
        weight: As torch's.
        bias: As torch's, or None.
        geometry: Stride, padding and the rest.
        micro: How many bytes of `x` backward may hold at once.
        compressor: For `x`; each micro-batch has a payload of its own.
        key: Feeds the compressor's random bits, another for each micro-batch.

    Returns:
        As torch's.

    Memory:
        Kept for backward: the payloads of x. In backward besides: one decompressed micro-batch,
        and one float32 copy of the weight's gradient.

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129: the pipeline of its level L3.1.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _Convolution.apply(x, weight, bias, geometry, micro, compressor, key)  # type: ignore[return-value]


class _Convolution(Function):
    @staticmethod
    def forward(  # noqa: PLR0913 (the op's own, and the site's)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        micro: MicroBatches,
        compressor: Compressor,
        key: Key,
    ) -> Tensor:
        ctx.geometry, ctx.compressor, ctx.shape, ctx.dtype = geometry, compressor, x.shape, x.dtype
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.step, ctx.parts = micro.samples(x), []
        saved: list[Tensor] = []
        for index, part in enumerate(x.split(ctx.step)):
            flat, layout = (part, None) if compressor.shaped else flatten(part)
            # A site's number has 32 bits: the index above them makes another seed.
            packed = compressor.compress(flat, key=key._replace(site=key.site + (index << 32)))
            ctx.parts.append((packed._replace(tensors=dict.fromkeys(packed.tensors)), layout))
            saved += packed.tensors.values()
        ctx.save_for_backward(*saved, weight)
        return torch.convolution(x, weight, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        *saved, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        dx = dw = db = None
        for index, (packed, layout) in enumerate(ctx.parts):
            tensors, saved = saved[: len(packed.tensors)], saved[len(packed.tensors) :]
            named = dict(zip(packed.tensors, tensors, strict=True))
            part = ctx.compressor.decompress(packed._replace(tensors=named))
            part = part if layout is None else restore(part, layout)
            first = index * ctx.step
            dx_part, dw_part, db_part = torch.ops.aten.convolution_backward(
                grad[first : first + ctx.step], part, weight, ctx.bias_sizes, *ctx.geometry, wanted
            )
            if dx_part is not None:
                dx = _joined(dx, dx_part, first, ctx.shape[0])
            dw, db = _added(dw, dw_part), _added(db, db_part)
            del part, dx_part, dw_part, db_part
        results = (dx, *(None if t is None else t.to(weight.dtype) for t in (dw, db)))
        return *results, None, None, None, None


def _joined(whole: Tensor | None, part: Tensor, first: int, n: int) -> Tensor:
    """`part` written into its place among `n` samples."""
    if whole is None:
        whole = part.new_empty((n, *part.shape[1:]))
    whole[first : first + len(part)] = part
    return whole


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum in float32, or wider."""
    if part is None:
        return total
    if total is None:
        return part if part.dtype == torch.float64 else part.float()
    return total.add_(part)


def _padding(
    value: Any, kernel: Sequence[int], dilation: tuple[int, ...]
) -> tuple[int, ...] | None:
    n = len(dilation)
    if value == "valid":
        return (0,) * n
    if value == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return None if any(t % 2 for t in total) else tuple(t // 2 for t in total)
    return per_dimension(value, n)

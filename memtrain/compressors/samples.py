"""Min/max groups with more bits for sensitive samples."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.group import Group
from memtrain.kernels.group import group


@dataclass(frozen=True, kw_only=True, repr=False)
class Samples(Compressor):
    """`Group` within each sample (an index of the leading dimension), with widths per sample.

    The most sensitive samples get the largest widths of `bits`: with `(4, 2, 2)`, 4 bits for the
    third with the highest sensitivity and 2 for the rest. A sample's sensitivity is the sum over
    its groups of (max - min)**2, for finite elements. No GPU synchronization is needed.

    A sample is padded to whole groups with its last element, and groups are no longer than the
    sample. Rounding is unbiased, and a NaN or an Inf changes no other element, as in `Group`.

    Args:
        bits: Widths, 1 to 8, for equal parts of the samples, in any order.
        group_size, rounding: As in `Group`.

    Memory:
        mean(bits) / 8 + 4 / group_size bytes per element, in whole groups of each sample, and 1 to
        4 bytes per sample if widths differ.

    Example:
        >>> compressor = Samples(bits=(4, 1))
        >>> compressor
        Samples(bits=2.5 (1x4 1x1), group_size=256)
        >>> packed = compressor.compress(torch.randn(6, 256), key=Key(seed=1))
        >>> packed.tensors["codes"].numel()  # 3 samples of 128 bytes, 3 of 32
        480

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129, section 4.2. Other factors of its code's
        sensitivity are equal within a tensor.
    """

    parts = ("codes", "bounds", "order")
    shaped = True  # a flat tensor has no samples

    bits: tuple[int, ...] = (2,)
    group_size: int = 256
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        widths = tuple(self.bits)
        if not widths:
            raise ValueError("bits=(); allowed: at least one width")
        for width in widths:
            Group(bits=width, group_size=self.group_size, rounding=self.rounding)
        # Sorted, so that equal shares are equal values. Configs contain lists.
        object.__setattr__(self, "bits", tuple(sorted(widths, reverse=True)))

    def __repr__(self) -> str:
        shares = " ".join(f"{n}x{width}" for width, n in Counter(self.bits).items())
        mean = f"{sum(self.bits) / len(self.bits):.4g}"
        parts = [f"bits={mean} ({shares})" if len(set(self.bits)) > 1 else f"bits={mean}"]
        parts.append(f"group_size={self.group_size}")
        parts += [f"rounding={self.rounding!r}"] if self.rounding != "stochastic" else []
        return f"Samples({', '.join(parts)})"

    def widths(self, n_samples: int) -> list[int]:
        """Return the widths for `n_samples` samples, the most sensitive first."""
        return [self.bits[rank * len(self.bits) // n_samples] for rank in range(n_samples)]

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Quantise `x`, sample by sample; a 0-d tensor is one sample.

        Returns:
            Tensors `codes`, uint8, widest first; `bounds`, bfloat16 [n_groups, 2]; and `order`,
            int [n_samples], the sample at each position, empty if all widths are equal.
        """
        rows = x.detach().reshape(_sizes(x.shape))
        n_samples, size = rows.shape
        length = _group_length(size, self.group_size)
        padded = _pad(rows, length)
        parts = list(self._parts(n_samples))
        order = torch.empty(0, dtype=torch.uint8, device=x.device)
        if len(parts) > 1:
            # Stable: equal tensors give equal payloads.
            ranges = _ranges(padded, length)
            order = torch.sort(ranges, descending=True, stable=True).indices
            padded = padded.index_select(0, order)
            order = order.to(_narrowest(n_samples))
        codes, bounds = [], []
        for width, begin, end in parts:
            # Each width draws its own random bits.
            seed = key._replace(microbatch=key.microbatch + (width << 32)).bits()
            stochastic = self.rounding == "stochastic"
            some = group.group_quantize(padded[begin:end], width, length, seed, stochastic)
            codes.append(some[0].view(-1))
            bounds.append(some[1])
        tensors = {"codes": torch.cat(codes), "bounds": torch.cat(bounds), "order": order}
        return Packed(tensors, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the tensor, contiguous, with the payload's shape and dtype."""
        n_samples, size = _sizes(packed.shape)
        length = _group_length(size, self.group_size)
        n_groups = -(-size // length)  # of a sample
        codes, order = packed.tensors["codes"], packed.tensors["order"]
        rows, offset = [], 0
        for width, begin, end in self._parts(n_samples):
            count = (end - begin) * n_groups
            row = length // 8 * width
            nbytes = count * row
            some = codes[offset : offset + nbytes].view(count, row)
            bounds = packed.tensors["bounds"][begin * n_groups : end * n_groups]
            flat = group.group_dequantize(some, bounds, width, length, count * length, packed.dtype)
            rows.append(flat.view(end - begin, n_groups * length)[:, :size])
            offset += nbytes
        if len(rows) == 1:
            return rows[0].contiguous().view(packed.shape)
        out = codes.new_empty(n_samples, size, dtype=packed.dtype)
        begin = 0
        for some in rows:
            out.index_copy_(0, order[begin : begin + len(some)].long(), some)
            begin += len(some)
        return out.view(packed.shape)

    def _parts(self, n_samples: int) -> Iterator[tuple[int, int, int]]:
        """Yield (width, first, end) of ranks with equal width; one empty part without samples."""
        begin = 0
        for width, n in Counter(self.widths(n_samples)).items():
            yield width, begin, begin + n
            begin += n
        if n_samples == 0:
            yield self.bits[0], 0, 0


def sensitivity(x: Tensor, group_size: int = 256) -> Tensor:
    """Return each sample's sensitivity: the sum over its groups of (max - min)**2.

    The leading dimension counts samples. The result is float32 [n_samples], for finite elements; 0
    without any.
    """
    rows = x.detach().reshape(_sizes(x.shape))
    length = _group_length(rows.shape[1], group_size)
    return _ranges(_pad(rows, length), length)


def _ranges(padded: Tensor, length: int) -> Tensor:
    n_samples, size = padded.shape
    if size == 0 or n_samples == 0:
        return padded.new_zeros(n_samples, dtype=torch.float32)
    groups = padded.view(n_samples, size // length, length).float()
    finite = groups.isfinite()
    lo = groups.where(finite, torch.inf).amin(2)
    hi = groups.where(finite, -torch.inf).amax(2)
    return torch.where(lo <= hi, hi - lo, 0.0).square().sum(1)


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of samples and the elements per sample."""
    n_samples = shape[0] if shape else 1
    return n_samples, torch.Size(shape[1:]).numel()


def _group_length(size: int, group_size: int) -> int:
    """Return the elements per group, at most those of a short row."""
    return min(group_size, max(8, -(-size // 8) * 8))


def _pad(rows: Tensor, length: int) -> Tensor:
    """Pad rows to whole groups with each row's last element, which keeps its range."""
    n_samples, size = rows.shape
    extra = -size % length
    if not extra:
        return rows.contiguous()
    return torch.cat([rows, rows[:, -1:].expand(n_samples, extra)], dim=1)


def _narrowest(n: int) -> torch.dtype:
    fitting = (d for d in (torch.uint8, torch.int16, torch.int32) if n <= torch.iinfo(d).max)
    return next(fitting, torch.int64)

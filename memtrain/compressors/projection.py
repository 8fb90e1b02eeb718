"""Random projections along the tokens: fewer rows, from which a weight's gradient is unbiased."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.compressors.base import SAVED, Compressor, Key, Packed
from memtrain.kernels.dct import dct, idct
from memtrain.kernels.random import draws

KINDS = ("rows", "norm_rows", "gaussian", "rademacher", "dct")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CHUNK = 1 << 22  # elements of S, or of transformed tokens, that exist at a time


@dataclass(frozen=True, kw_only=True)
class Projection(Compressor):
    """Keeps `S x` for an x of [tokens, features], and gives back `S^T (S x)`: E[S^T S] = I.

    A linear layer reads its input in backward only for `grad_W = dy^T x`. With this it becomes
    `(S dy)^T (S x)`: unbiased, its variance as in docs/guides/compressors.md; the gradients
    of input and bias stay exact. So does every gradient that is *linear* in the saved tensor; what
    reads it through a nonlinearity (a norm, an activation, softmax) is biased: write rules for
    `op: linear|addmm`. S, [p, tokens], is replayed from the key's 64 bits and never stored:

    - `rows`: p different tokens, uniformly chosen; their rows are kept exactly.
    - `norm_rows`: p draws with replacement, a token's probability in proportion to its norm. S
      depends on x, so the drawn tokens and their weights are stored too. A token's probability is
      rounded up to 2**-40; where a norm is NaN or Inf, or all are 0, it is uniform.
    - `gaussian`: independent normal numbers of variance 1 / p, of 16 + 16 random bits.
    - `rademacher`: independent signs over sqrt(p).
    - `dct`: random signs, orthonormal cosine transform, p different coefficients: the least
      arithmetic for large p, in any number of tokens.

    With p not below the tokens (0-d and 1-d tensors have one token) x is kept exactly. A NaN or an
    Inf spoils its feature in all tokens; with `rows` its token alone, with `norm_rows` anything.
    The random bits are the same on every device; products are rounded as its matmul rounds.

    Args:
        kind: One of the above.
        ratio: p over the tokens, above 0, at most 1; p is rounded to nearest, half to even.
        min_rows: p is at least this, ...
        max_rows: ... and at most this, if given.

    Raises:
        ValueError: If a field is out of range.

    Memory:
        ratio times the bytes of x, and 8 bytes; `norm_rows` adds 12 bytes a row (16 for float64).
        Working: at most 2**22 elements of S (64 MiB with its random words) or of transformed
        tokens (one feature at a time where there are more tokens), and [p, features] in float32.

    Example:
        >>> x = torch.arange(40.0).view(20, 2)
        >>> compressor = Projection(kind="rows", ratio=0.25, min_rows=1)
        >>> packed = compressor.compress(x, key=Key(seed=1))
        >>> packed.tensors["rows"].shape, compressor.decompress(packed).shape
        (torch.Size([5, 2]), torch.Size([20, 2]))

    Reference:
        Bershatsky et al., Memory-Efficient Backpropagation through Large Linear Layers, 2022,
        arXiv:2201.13195. Drineas, Kannan and Mahoney, Fast Monte Carlo algorithms for matrices I,
        SIAM J. Comput. 36, 2006 (`norm_rows`).
    """

    parts = ("rows", "key", "index", "weight")
    roles = SAVED
    shaped = True

    kind: str = "gaussian"
    ratio: float = 0.2
    min_rows: int = 16
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; allowed: {', '.join(map(repr, KINDS))}")
        if not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio!r}; allowed: above 0, at most 1")
        if not _is_count(self.min_rows):
            raise ValueError(f"min_rows={self.min_rows!r}; allowed: integers from 1")
        if self.max_rows is not None and not _is_count(self.max_rows, self.min_rows):
            raise ValueError(
                f"max_rows={self.max_rows!r}; allowed: None, integers from min_rows={self.min_rows}"
            )

    def rows(self, tokens: int) -> int:
        """Return the number of rows kept for a number of tokens.

        Args:
            tokens: Product of all sizes but the last.

        Returns:
            p, at most `tokens`.

        Example:
            >>> [Projection(ratio=0.2).rows(tokens) for tokens in (10, 50, 1000)]
            [10, 16, 200]
        """
        wanted = max(round(self.ratio * tokens), self.min_rows)
        return min(wanted, self.max_rows or wanted, tokens)

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Project `x` along its tokens.

        Args:
            x: [..., features], float32, bfloat16, float16 or float64.
            key: Gives S.

        Returns:
            Tensors `rows`, of `x`'s dtype, [p, features] (for `rows` and `norm_rows` the chosen
            rows themselves), and `key`, int64 [1] on the CPU; for `norm_rows`, in place of the key,
            `index`, int64 [p], and `weight`, [p]. `rows` alone, of `x`'s shape, where x is kept.

        Raises:
            TypeError: If `x` is of another dtype.
        """
        if x.dtype not in _FLOATS:
            raise TypeError(f"dtype {x.dtype}; allowed: {', '.join(map(str, _FLOATS))}")
        x, tokens = x.detach(), _tokens(x.shape)
        p = self.rows(tokens)
        if p == tokens:
            return Packed({"rows": x.clone()}, x.shape, x.dtype)
        seed = key.bits()
        if _has_no_values(x):  # without features, S would be made for nothing
            payload = self._empty(x, p)
        else:
            with torch.autocast(x.device.type, enabled=False):
                payload = self._project(x.reshape(tokens, x.shape[-1]), p, seed)
        if self.kind != "norm_rows":
            payload["key"] = torch.tensor([seed], device="cpu")
        return Packed(payload, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return `S^T (S x)`, contiguous, of the payload's shape and dtype."""
        rows, tokens = packed.tensors["rows"], _tokens(packed.shape)
        if self.rows(tokens) == tokens:
            return rows.view(packed.shape)
        if _has_no_values(rows):
            return rows.new_empty(packed.shape)
        with torch.autocast(rows.device.type, enabled=False):
            return self._expand(packed.tensors, tokens).view(packed.shape)

    def _empty(self, x: Tensor, p: int) -> dict[str, Tensor]:
        payload = {"rows": x.new_empty(p, x.shape[-1])}
        if self.kind == "norm_rows":
            payload["index"] = x.new_zeros(p, dtype=torch.int64)
            payload["weight"] = x.new_zeros(p, dtype=_wide(x.dtype))
        return payload

    def _project(self, x: Tensor, p: int, seed: int) -> dict[str, Tensor]:
        if self.kind == "norm_rows":
            norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
            index, weight = draws.draw(norms, p, seed)
            return {"rows": x[index], "index": index, "weight": weight.to(_wide(x.dtype))}
        if self.kind == "rows":
            return {"rows": x[draws.choose(x.shape[0], p, seed, x.device)]}
        if self.kind == "dct":
            return {"rows": _dct_rows(x, p, seed)}
        total = x.new_zeros(p, x.shape[1], dtype=_wide(x.dtype))
        for start, stop in _chunks(x.shape[0], p):
            matrix = _matrix(self.kind, p, start, stop, seed, x)
            total += matrix @ x[start:stop].contiguous()
        return {"rows": (total * _scale(p)[1]).to(x.dtype)}

    def _expand(self, payload: dict[str, Tensor], tokens: int) -> Tensor:
        rows = payload["rows"]
        if self.kind == "norm_rows":
            scaled = rows.to(_wide(rows.dtype)) * payload["weight"].unsqueeze(1)
            return _scatter(scaled.to(rows.dtype), payload["index"], tokens)
        p, seed = rows.shape[0], int(payload["key"].item())
        if self.kind == "rows":
            index = draws.choose(tokens, p, seed, rows.device)
            scaled = rows.to(_wide(rows.dtype)) * (tokens / p)
            return _scatter(scaled.to(rows.dtype), index, tokens)
        if self.kind == "dct":
            return _dct_tokens(rows, tokens, seed)
        result = rows.new_empty(tokens, rows.shape[1])
        for start, stop in _chunks(tokens, p):
            matrix = _matrix(self.kind, p, start, stop, seed, rows)
            torch.mm(matrix.t(), rows, out=result[start:stop])
        return result.mul_(_scale(p)[1])


def _is_count(value: object, lowest: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _tokens(shape: torch.Size) -> int:
    return math.prod(shape[:-1])


def _has_no_values(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) or x.is_meta or x.numel() == 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(tokens: int, p: int) -> list[tuple[int, int]]:
    """Return ranges of tokens whose columns of S are generated together, with separate keys.

    It depends on nothing but the arguments: compress and decompress must see the same S.
    """
    size = max(1, _CHUNK // p)
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scale(p: int) -> tuple[float, float]:
    """Factor 1 / sqrt(p) into a power of 2, exact in every dtype, and a remainder around 1."""
    power = 2.0 ** -round(math.log2(p) / 2)
    return power, 1 / (power * math.sqrt(p))


def _matrix(kind: str, p: int, start: int, stop: int, seed: int, like: Tensor) -> Tensor:
    """Return columns `start` to `stop` of S without `_scale`'s second factor, like `like`."""
    values = draws.normals if kind == "gaussian" else draws.signs
    numbers = values(p * (stop - start), Key(seed, call=start).bits(), like.device)
    return (numbers * _scale(p)[0]).to(like.dtype).view(p, stop - start)


def _scatter(rows: Tensor, index: Tensor, tokens: int) -> Tensor:
    return rows.new_zeros(tokens, rows.shape[1]).index_copy_(0, index, rows)


def _features(tokens: int, features: int) -> list[tuple[int, int]]:
    """Return ranges of features that are transformed together."""
    size = max(1, _CHUNK // tokens)
    return [(start, min(start + size, features)) for start in range(0, features, size)]


def _dct_plan(tokens: int, p: int, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    signs = draws.signs(tokens, Key(seed, call=0).bits(), like.device).to(_wide(like.dtype))
    return signs, draws.choose(tokens, p, Key(seed, call=1).bits(), like.device)


def _dct_rows(x: Tensor, p: int, seed: int) -> Tensor:
    tokens = x.shape[0]
    signs, index = _dct_plan(tokens, p, seed, x)
    rows = x.new_empty(p, x.shape[1])
    for start, stop in _features(tokens, x.shape[1]):
        some = x[:, start:stop].t().to(signs.dtype) * signs
        rows[:, start:stop] = dct(some)[:, index].t() * math.sqrt(tokens / p)
    return rows


def _dct_tokens(rows: Tensor, tokens: int, seed: int) -> Tensor:
    p = rows.shape[0]
    signs, index = _dct_plan(tokens, p, seed, rows)
    result = rows.new_empty(tokens, rows.shape[1])
    for start, stop in _features(tokens, rows.shape[1]):
        sparse = signs.new_zeros(stop - start, tokens)
        sparse[:, index] = rows[:, start:stop].t().to(signs.dtype) * math.sqrt(tokens / p)
        result[:, start:stop] = (idct(sparse) * signs).t()
    return result

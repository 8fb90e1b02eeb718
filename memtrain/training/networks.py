"""Models of `memtrain-train`: a small GPT, and the user's models (`pretrained`)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.activations.intercept.recompute import blocks_of
from memtrain.config.errors import in_range
from memtrain.training.batches import IGNORED
from memtrain.training.pretrained import Pretrained, py
from memtrain.training.settings import build_named

VOCABULARY = 256  # one token per byte


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over earlier tokens; [batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Two Linears around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, tokens, width] to the same shape."""
        return self.down(F.gelu(self.up(x)))


class DecoderBlock(nn.Module):
    """Attention and MLP, each on a residual branch behind a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, tokens, width] to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A byte-level pre-norm decoder whose output layer is tied to its embedding.

    Example:
        >>> model = GPT(layers=1, width=16, heads=2, context=8)
        >>> sum(p.numel() for p in model.parameters())
        7536
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 1024,
        dropout: float = 0.0,
    ) -> None:
        sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
        for name, value in sizes.items():
            in_range(f"model.{name}", value, at_least=1)
        in_range("model.dropout", dropout, at_least=0, below=1)
        if width % heads:
            raise ValueError(f"model.width={width} is not a multiple of model.heads={heads}")
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # the residual branches' last layers
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits of the next byte, [batch, tokens, 256], or with labels their mean loss.

        Labels are -100 where there is nothing to learn.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def _initialise(module: nn.Module) -> None:
    """Initialise as GPT-2: normal weights with deviation 0.02, zero biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


MODELS: dict[str, Callable[..., nn.Module | Pretrained]] = {
    "gpt": GPT,
    "hf": Pretrained,
    "py": py,
}
"""Name in a config -> the class or function of the config's other keys."""


def build_model(spec: Mapping[str, Any], seed: int) -> nn.Module:
    """Build a model on the CPU from its config; `seed` seeds torch's global generator.

    Example:
        >>> model = build_model({"name": "gpt", "layers": 1, "width": 16, "heads": 2}, seed=0)
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 256])
    """
    torch.manual_seed(seed)
    model = build_named("model", spec, MODELS)
    return model.build() if isinstance(model, Pretrained) else model


def described(spec: Mapping[str, Any]) -> Pretrained | None:
    """Return a transformers model before it is built; None for another model."""
    found = build_named("model", spec, MODELS) if spec.get("name") == "hf" else None
    return found if isinstance(found, Pretrained) else None


def compile_in_place(model: nn.Module, how: str, *, dynamic: bool | None = None) -> None:
    """Compile a model in place, whole or each of its repeated blocks (`COMPILE`).

    Example:
        >>> compile_in_place(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "blocks")
        Traceback (most recent call last):
        ...
        ValueError: compile=blocks: Sequential repeats no blocks; allowed: true, false
    """
    if how == "true":
        model.compile(dynamic=dynamic)
    if how != "blocks":
        return
    paths = blocks_of(model)
    if not paths:
        name = type(model).__name__
        raise ValueError(f"compile=blocks: {name} repeats no blocks; allowed: true, false")
    for path in paths:
        model.get_submodule(path).compile(dynamic=dynamic)

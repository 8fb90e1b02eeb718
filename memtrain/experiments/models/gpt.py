"""A byte-level GPT in plain PyTorch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.experiments.config import in_range

VOCABULARY = 256  # one token a byte


@dataclass(kw_only=True)
class GPTConfig:
    """A pre-norm decoder with tied embeddings.

    Example:
        >>> model = GPTConfig(layers=1, width=16, heads=2, context=8).build()
        >>> sum(p.numel() for p in model.parameters())
        7536
    """

    kind: ClassVar[str] = "tokens"
    layers: int = 4
    """Blocks."""
    width: int = 128
    """Channels; a multiple of `heads`."""
    heads: int = 4
    """Attention heads."""
    context: int = 1024
    """Longest sequence, in tokens."""
    dropout: float = 0.0
    """On the embeddings and on each branch."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            in_range(f"model.{name}", getattr(self, name), at_least=1)
        in_range("model.dropout", self.dropout, at_least=0, below=1)
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} is no multiple of model.heads={self.heads}")

    def build(self) -> nn.Module:
        """A new model with random weights."""
        return GPT(self)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over earlier tokens; [batch, tokens, width] to the same."""
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
        """[batch, tokens, width] to the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each on a residual branch behind a LayerNorm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Embeddings, blocks, a last norm, and the embedding again as the output layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # the residual branches' last layers
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens: int64, [batch, tokens], 0 to 255.

        Returns:
            [batch, tokens, 256].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    """GPT-2's: normal weights of deviation 0.02, no bias."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

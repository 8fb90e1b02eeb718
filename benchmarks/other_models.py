"""Small models of transformers and torch.nn: for peaks of any model. Nothing is downloaded."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import decoder, hf, text


class Other(NamedTuple):
    """A model, what it is called with, and the loss of its output (None: its own, or a sum)."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


class Recurrent(nn.Module):
    """A language model around a recurrent layer."""

    def __init__(self, kind: type[nn.Module], width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.rnn = kind(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [batch, time, 512]."""
        return self.head(self.rnn(self.embed(tokens))[0])


class PointNet(nn.Module):
    """Points through shared layers, then the greatest of each channel."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [batch, 10], of points [batch, 3, points]."""
        return self.last(self.head(self.points(x).amax(2)))


class Frozen(nn.Module):
    """A convolutional backbone that is not trained, and a head that is."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.backbone = nn.Sequential(*layers).requires_grad_(False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [batch, 10]."""
        return self.head(self.backbone(x).mean((2, 3)))


class Translator(nn.Module):
    """`nn.Transformer` between an embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        self.inner = nn.Transformer(128, 4, 2, 2, 512, batch_first=True)
        self.head = nn.Linear(128, 512)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits, [batch, time, 512]."""
        mask = self.inner.generate_square_subsequent_mask(target.shape[1])
        x = self.inner(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class Block(nn.Module):
    """A residual block of a diffusion U-Net with a time embedding."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, a), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1))
        self.time = nn.Linear(128, b)
        self.second = nn.Sequential(nn.GroupNorm(8, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1))
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[batch, b, height, width]."""
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class DiffusionUNet(nn.Module):
    """Two resolutions, with attention at the lower one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, 128), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width), Block(width, 2 * width)])
        self.pool = nn.Conv2d(width, width, 3, 2, 1)
        self.norm = nn.GroupNorm(8, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.middle = Block(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = Block(2 * width, width)
        self.out = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """The noise, shaped as `x`."""
        speeds = torch.exp(-9.2 / 64 * torch.arange(64, device=x.device))
        angles = step[:, None].to(speeds.dtype) * speeds
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        a = self.down[0](self.first(x), time)
        b = self.down[1](self.pool(a), time)
        rows = self.norm(b).flatten(2).transpose(1, 2)
        b = b + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).view_as(b)
        b = self.middle(b, time)
        return self.out(self.last(torch.cat([a, self.up(b)], 1), time))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with norms first and GELU, over the tokens of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(512, 128)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [batch, time, 512]."""
        return self.head(self.layers(self.embed(tokens)))


def autoencoder() -> nn.Module:
    """Convolutions down and transposed ones up, with instance norms and leaky ReLUs."""
    down: list[nn.Module] = []
    up: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128)):
        down += [nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.2)]
    for a, b in ((128, 64), (64, 32)):
        up += [nn.ConvTranspose2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b, affine=True), nn.ReLU()]
    return nn.Sequential(*down, *up, nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())


def _tokens(batch: int = 8, time: int = 128) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    labels = torch.randint(0, 512, (batch * time,))
    tokens = torch.randint(0, 512, (batch, time))
    return tokens, lambda logits: F.cross_entropy(logits.flatten(0, 1), labels)


def _classes(batch: int = 8) -> Callable[[Any], Tensor]:
    labels = torch.randint(0, 10, (batch,))
    return lambda logits: F.cross_entropy(logits, labels)


def _recurrent(kind: type[nn.Module]) -> Other:
    tokens, loss = _tokens()
    return Other(Recurrent(kind), tokens, loss)


def _translator() -> Other:
    tokens, loss = _tokens()
    return Other(Translator(), (tokens, tokens.clone()), loss)


def _encoder() -> Other:
    tokens, loss = _tokens()
    return Other(Encoder(), tokens, loss)


def _unet() -> Other:
    noise = torch.randn(8, 3, 32, 32)
    batch = (torch.randn(8, 3, 32, 32), torch.randint(0, 1000, (8,)))
    return Other(DiffusionUNet(), batch, lambda found: F.mse_loss(found.float(), noise))


def _hf(kind: str, config: str, batch: Callable[[], dict[str, Tensor]], **options: Any) -> Other:
    case = hf(kind, config, batch, **options)
    return Other(case.model, case.batch)


def _clip() -> Other:
    import transformers

    sizes = {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 512, "max_position_embeddings": 64},
        vision_config={**sizes, "image_size": 64, "patch_size": 8},
        projection_dim=64,
    )
    batch = {
        "input_ids": torch.randint(3, 512, (8, 64)),
        "pixel_values": torch.randn(8, 3, 64, 64),
        "return_loss": True,
    }
    return Other(transformers.CLIPModel(config).train(), batch)


def _whisper() -> dict[str, Tensor]:
    tokens = torch.randint(0, 512, (8, 32))
    return {"input_features": torch.randn(8, 16, 128), "labels": tokens}


def _segformer() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 10, (8, 64, 64))}


MODELS: dict[str, Callable[[], Other]] = {
    "lstm": lambda: _recurrent(nn.LSTM),
    "pointnet": lambda: Other(PointNet(), torch.randn(8, 3, 1024), _classes()),
    "frozen_backbone": lambda: Other(Frozen(), torch.randn(8, 3, 128, 128), _classes()),
    "nn_transformer": _translator,
    "clip": _clip,
    "diffusion_unet": _unet,
    "mamba": lambda: _hf(
        "CausalLM", "MambaConfig", text, vocab_size=512, hidden_size=128, num_hidden_layers=2,
        state_size=8,
    ),
    "gru": lambda: _recurrent(nn.GRU),
    "nn_encoder": _encoder,
    "autoencoder": lambda: Other(
        autoencoder(), torch.randn(8, 3, 64, 64), lambda y: y.square().mean()
    ),
    "convbert": lambda: _hf(
        "MaskedLM", "ConvBertConfig", text, **decoder(
            num_hidden_layers=2, intermediate_size=512, embedding_size=128, head_ratio=2,
        ),
    ),
    "whisper": lambda: _hf(
        "SpeechSeq2Seq", "WhisperConfig", _whisper, vocab_size=512, num_mel_bins=16, d_model=128,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=64, max_target_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "segformer": lambda: _hf(
        "SemanticSegmentation", "SegformerConfig", _segformer, hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=64,
        num_labels=10,
    ),
}  # fmt: skip
"""Name -> makes a model, its batch and its loss."""

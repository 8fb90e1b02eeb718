"""The models of the benchmark `peaks`: from papers, around torch.nn, and of transformers.

Nothing is downloaded, and no model needs a library of models besides transformers.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import architectures
from benchmarks.families import FAMILIES, Case, decoder, hf, images, text
from benchmarks.paper_models import (
    PAPERS,
    Layers,
    Model,
    per_place,
    per_token,
    squares,
    unet,
)


def functional_decoder(width: int = 128, depth: int = 6, *, checkpoints: bool = False) -> Model:
    """Vaswani et al. 2017: decoder blocks by functions alone; every second one checkpointed."""

    def block(net: Any, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 4, -1)
        parts = net.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, 2)
        q, k, v = (y.view(shape).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + net.out(y.transpose(1, 2).flatten(2))
        a, b = net.up(F.layer_norm(x, x.shape[-1:])).chunk(2, 2)
        return x + net.down(F.silu(a) * b)

    def connect(net: Any, tokens: Tensor) -> Tensor:
        x = net.embed(tokens)
        for number, layer in enumerate(net.blocks):
            again = checkpoints and number % 2
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return F.linear(F.rms_norm(x, x.shape[-1:]), net.embed.weight)

    def layers() -> dict[str, nn.Module]:
        pairs = {"qkv": (1, 3), "out": (1, 1), "up": (1, 8), "down": (4, 1)}
        return {name: nn.Linear(a * width, b * width) for name, (a, b) in pairs.items()}

    blocks = [Layers(block, **layers()) for _ in range(depth)]
    model = Layers(connect, embed=nn.Embedding(500, width), blocks=blocks)
    return Model(model, torch.randint(500, (8, 128)), per_token)


def perceiver(width: int = 64) -> Model:
    """Jaegle et al. 2021: latents that attend to a long input, twice."""

    def connect(net: Any, x: Tensor) -> Tensor:
        latents = net.latents.expand(len(x), -1, -1)
        for _ in range(2):
            latents = latents + net.attend(latents, x, x, need_weights=False)[0]
            latents = net.mix(latents)
        return latents

    model = Layers(
        connect,
        latents=nn.Parameter(torch.randn(32, width)),
        attend=nn.MultiheadAttention(width, 4, batch_first=True),
        mix=nn.TransformerEncoderLayer(width, 4, 256, batch_first=True, activation="gelu"),
    )
    return Model(model, torch.randn(8, 512, width), squares)


def recurrent(kind: type[nn.Module], width: int = 256) -> Model:
    """A language model around a recurrent layer of torch.nn."""

    def connect(net: Any, tokens: Tensor) -> Tensor:
        return net.head(net.rnn(net.embed(tokens))[0])

    rnn = kind(width, width, 2, batch_first=True, dropout=0.1)
    model = Layers(connect, embed=nn.Embedding(512, width), rnn=rnn, head=nn.Linear(width, 512))
    return Model(model, torch.randint(512, (8, 128)), per_token)


def frozen_backbone() -> Model:
    """A convolutional backbone that is not trained, and a head that is."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((3, 32, 64, 128)):
        layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    backbone = nn.Sequential(*layers).requires_grad_(False)
    model = Layers(
        lambda net, x: net.head(net.backbone(x).mean((2, 3))),
        backbone=backbone,
        head=nn.Linear(128, 10),
    )
    return Model(model, torch.randn(8, 3, 128, 128), per_place)


def nn_transformer() -> Model:
    """`nn.Transformer` between an embedding and logits."""

    def connect(net: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = net.inner.generate_square_subsequent_mask(target.shape[1])
        x, y = net.embed(source), net.embed(target)
        return net.head(net.inner(x, y, tgt_mask=mask, tgt_is_causal=True))

    inner = nn.Transformer(128, 4, 2, 2, 512, batch_first=True)
    model = Layers(connect, embed=nn.Embedding(512, 128), inner=inner, head=nn.Linear(128, 512))
    tokens = torch.randint(512, (8, 128))
    return Model(model, (tokens, tokens.clone()), per_token)


def nn_encoder() -> Model:
    """`nn.TransformerEncoder` with norms first and GELU, over the tokens of an embedding."""
    layer = nn.TransformerEncoderLayer(
        128, 4, 512, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(512, 128), encoder, nn.Linear(128, 512))
    return Model(model, torch.randint(512, (8, 128)), per_token)


def _case(make: Callable[[], Case]) -> Model:
    """A model of transformers, or of `benchmarks.families`."""
    case = make()
    if isinstance(case.batch, dict):
        return Model(case.model, case.batch)
    pixels, labels = case.batch
    return Model(case.model, pixels, lambda output: F.cross_entropy(output, labels))


def _clip() -> Case:
    import transformers

    sizes = decoder(intermediate_size=512, num_hidden_layers=2)
    pixels = {"image_size": 64, "patch_size": 8}
    config = transformers.CLIPConfig(
        text_config={**sizes, "max_position_embeddings": 64}, vision_config={**sizes, **pixels}
    )
    batch = {
        "input_ids": torch.randint(3, 512, (8, 64)),
        "pixel_values": torch.randn(8, 3, 64, 64),
        "return_loss": True,
    }
    return Case(transformers.CLIPModel(config).train(), batch)


def _whisper() -> dict[str, Tensor]:
    tokens = torch.randint(0, 512, (8, 32))
    return {"input_features": torch.randn(8, 16, 128), "labels": tokens}


def _segformer() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 10, (8, 64, 64))}


def _larger(kind: str, name: str) -> Case:
    """An architecture of `benchmarks.architectures` in twice its widths, with longer texts."""
    sizes = {key: 2 * n if n >= 16 else n for key, n in architectures.SMALL.items()}
    if kind == "ImageClassification":
        return architectures.build(kind, name)
    batch = {key: tokens + 3 for key, tokens in text(8, 128, 197).items()}
    if kind == "SequenceClassification":
        batch["labels"] = torch.randint(0, 2, (8,))
    return architectures.build(kind, name, sizes)._replace(batch=batch)


LARGER = {
    "CausalLM": (
        "bloom", "falcon", "gemma2", "gpt_neox", "mamba", "mpt", "phi", "qwen3", "rwkv",
        "stablelm", "starcoder2",
    ),
    "Seq2SeqLM": ("bart", "umt5"),
    "SequenceClassification": (
        "albert", "convbert", "deberta-v2", "distilbert", "electra", "fnet", "funnel",
        "mobilebert", "modernbert", "nystromformer", "squeezebert",
    ),
    "ImageClassification": ("levit", "mobilevitv2", "poolformer", "pvt_v2", "swiftformer"),
}  # fmt: skip
"""Kind -> architectures of transformers."""
TWELVE: dict[str, Callable[[], Case]] = {
    **{name: make for name, make in FAMILIES.items() if name != "cifar_resnet18"},
    "bert": lambda: hf(
        "MaskedLM", "BertConfig", text, **decoder(num_hidden_layers=3, intermediate_size=512),
    ),
    "opt": lambda: hf(
        "CausalLM", "OPTConfig", text,
        **decoder(num_hidden_layers=3, ffn_dim=512, word_embed_proj_dim=128),
    ),
    "convnext": lambda: hf(
        "ImageClassification", "ConvNextConfig", lambda: images(64), hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 2, 1], num_labels=10,
    ),
}  # fmt: skip
"""The families whose steps are also predicted under autocast, checkpointing and release."""
MODELS: dict[str, Callable[[], Model]] = {
    **PAPERS,
    "unet_3d": partial(unet, dims=3),
    "channels_last": partial(unet, memory_format=torch.channels_last),
    "half_checkpointed": partial(functional_decoder, checkpoints=True),
    "lstm": partial(recurrent, nn.LSTM),
    "gru": partial(recurrent, nn.GRU),
    **{make.__name__: make for make in (functional_decoder, perceiver)},
    **{make.__name__: make for make in (frozen_backbone, nn_transformer, nn_encoder)},
    **{name: partial(_case, make) for name, make in TWELVE.items()},
    "clip": partial(_case, _clip),
    "whisper": partial(_case, lambda: hf(
        "SpeechSeq2Seq", "WhisperConfig", _whisper, vocab_size=512, num_mel_bins=16, d_model=128,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=64, max_target_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )),
    "segformer": partial(_case, lambda: hf(
        "SemanticSegmentation", "SegformerConfig", _segformer, hidden_sizes=[32, 64, 96, 128],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=64,
        num_labels=10,
    )),
    **{
        name: partial(_case, partial(_larger, kind, name))
        for kind, names in LARGER.items()
        for name in names
    },
}  # fmt: skip
"""Name -> makes a model, its batch and its loss."""

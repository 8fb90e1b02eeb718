"""The models that `memtrain-report` knows by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TASKS = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification")
"""Tasks of transformers' `AutoModelFor` classes."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A named model: its transformers config, and the task that it is trained for."""

    config: str
    """Name of the config class."""
    task: str
    """One of `TASKS`; empty for a text model without a head."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The config's arguments."""
    seq: int = 512
    """Tokens by default."""
    longest: int = 0
    """Most tokens that its learned positions take; 0 has none."""


def _gpt2(width: int, layers: int, heads: int) -> NamedModel:
    options = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return NamedModel(config="GPT2Config", task="CausalLM", options=options, seq=1024, longest=1024)


def _transformer(width: int, layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        **more,
    }


def _llama(
    config: str, width: int, layers: int, heads: int, hidden: int, **more: Any
) -> NamedModel:
    options = _transformer(width, layers, heads, hidden, **more)
    return NamedModel(config=config, task="CausalLM", options=options, seq=2048)


def _opt(width: int, layers: int, heads: int) -> NamedModel:
    options = _transformer(width, layers, heads, 4 * width, ffn_dim=4 * width)
    options["word_embed_proj_dim"] = width
    return NamedModel(config="OPTConfig", task="CausalLM", options=options, seq=2048, longest=2048)


def _bert(width: int, layers: int, heads: int) -> NamedModel:
    options = _transformer(width, layers, heads, 4 * width)
    return NamedModel(config="BertConfig", task="MaskedLM", options=options, longest=512)


def _roberta(width: int, layers: int, heads: int) -> NamedModel:
    positions = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    options = _transformer(width, layers, heads, 4 * width, **positions)
    return NamedModel(config="RobertaConfig", task="MaskedLM", options=options, longest=512)


def _t5(width: int, hidden: int, layers: int, heads: int) -> NamedModel:
    options = {"d_model": width, "d_ff": hidden, "num_layers": layers, "num_heads": heads}
    options["decoder_start_token_id"] = 0
    return NamedModel(config="T5Config", task="Seq2SeqLM", options=options)


def _image(config: str, **options: Any) -> NamedModel:
    options = {"num_labels": 1000, **options}
    return NamedModel(config=config, task="ImageClassification", options=options)


def _vit(width: int, layers: int, heads: int) -> NamedModel:
    return _image("ViTConfig", **_transformer(width, layers, heads, 4 * width))


def _resnet(*depths: int, basic: bool = False) -> NamedModel:
    widths = [64, 128, 256, 512] if basic else [256, 512, 1024, 2048]
    kind = "basic" if basic else "bottleneck"
    return _image("ResNetConfig", depths=list(depths), hidden_sizes=widths, layer_type=kind)


def _efficientnet(
    width: float, depth: float, image: int, channels: int, dropout: float
) -> NamedModel:
    sizes = {"width_coefficient": width, "depth_coefficient": depth, "image_size": image}
    return _image("EfficientNetConfig", hidden_dim=channels, dropout_rate=dropout, **sizes)


NAMED_MODELS: dict[str, NamedModel] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-7b": _llama("LlamaConfig", 4096, 32, 32, 11008),
    "llama-13b": _llama("LlamaConfig", 5120, 40, 40, 13824),
    "llama-3-8b": _llama(
        "LlamaConfig", 4096, 32, 32, 14336, num_key_value_heads=8, vocab_size=128256
    ),
    "mistral-7b": _llama("MistralConfig", 4096, 32, 32, 14336, num_key_value_heads=8),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "distilbert": NamedModel(config="DistilBertConfig", task="MaskedLM", longest=512),
    "roberta-base": _roberta(768, 12, 12),
    "roberta-large": _roberta(1024, 24, 16),
    "vit": _vit(768, 12, 12),
    "vit-large": _vit(1024, 24, 16),
    "swin": _image("SwinConfig"),
    "swin-base": _image(
        "SwinConfig", embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32]
    ),
    "resnet18": _resnet(2, 2, 2, 2, basic=True),
    "resnet34": _resnet(3, 4, 6, 3, basic=True),
    "resnet50": _resnet(3, 4, 6, 3),
    "resnet101": _resnet(3, 4, 23, 3),
    "resnet152": _resnet(3, 8, 36, 3),
    "convnext": _image("ConvNextConfig"),
    "mobilenet_v2": _image("MobileNetV2Config"),
    "efficientnet-b0": _efficientnet(1.0, 1.0, 224, 1280, 0.2),
    "efficientnet-b3": _efficientnet(1.2, 1.4, 300, 1536, 0.3),
    "efficientnet-b7": _efficientnet(2.0, 3.1, 600, 2560, 0.5),
}
"""Name -> model, in the order that `--help` prints."""

"""Unmodified models of ten families under each preset: bytes, gradients, predictions.

    python -m benchmarks run families [--set presets=balanced,smallest families=gpt2]

Small members of each family (from config classes: nothing is downloaded) take one forward and
backward, plain and under the preset. A row says what the saved activations take alive, what the
plan predicted, and the cosine between the two gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memtrain
from benchmarks.harness import Benchmark, Job, Options, Row
from experiments.cifar import cifar
from memtrain.audit.live_storages import saved_nbytes

PRESETS = (
    "balanced", "smallest", "checkpointed", "fewbit3", "actnn_fewbit", "patch4x4", "gact4"
)  # fmt: skip


class Case(NamedTuple):
    """A model and what it is called with; the loss is the model's own or a cross-entropy."""

    model: nn.Module
    batch: dict[str, Tensor] | tuple[Tensor, Tensor]

    def loss(self) -> Tensor:
        """The loss of one forward."""
        if isinstance(self.batch, dict):
            return self.model(**self.batch).loss
        images, labels = self.batch
        return F.cross_entropy(self.model(images), labels)


def text(batch: int = 8, seq: int = 128, vocabulary: int = 512) -> dict[str, Tensor]:
    """Random tokens, and themselves as labels."""
    tokens = torch.randint(0, vocabulary, (batch, seq))
    return {"input_ids": tokens, "labels": tokens.clone()}


def images(size: int, batch: int = 8, classes: int = 10) -> dict[str, Tensor]:
    """Random pixels and classes."""
    pixels = torch.randn(batch, 3, size, size)
    return {"pixel_values": pixels, "labels": torch.randint(0, classes, (batch,))}


def hf(kind: str, config: str, batch: Callable[[], dict[str, Tensor]], **options: Any) -> Case:
    """A model from a transformers config class."""
    import transformers

    cls = getattr(transformers, f"AutoModelFor{kind}")
    return Case(cls.from_config(getattr(transformers, config)(**options)).train(), batch())


def decoder(heads: int = 4, **options: Any) -> dict[str, Any]:
    """Options that text models share."""
    return {"num_attention_heads": heads, "vocab_size": 512, "hidden_size": 128, **options}


def _cifar(family: str) -> Case:
    model = cifar(family=family, width=0.5, channels=3)
    return Case(model.train(), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))))


FAMILIES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: hf(
        "CausalLM", "GPT2Config", text, n_embd=128, n_layer=3, n_head=4, vocab_size=512,
        bos_token_id=0, eos_token_id=0,
    ),
    "roberta": lambda: hf(
        "MaskedLM", "RobertaConfig", text, **decoder(num_hidden_layers=3, intermediate_size=512),
    ),
    "llama": lambda: hf(
        "CausalLM", "LlamaConfig", text,
        **decoder(num_hidden_layers=3, intermediate_size=384, num_key_value_heads=2),
    ),
    "t5": lambda: hf(
        "Seq2SeqLM", "T5Config", text, d_model=128, d_ff=256, d_kv=32, num_heads=4, num_layers=2,
        vocab_size=512, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    ),
    "vit": lambda: hf(
        "ImageClassification", "ViTConfig", lambda: images(64), image_size=64, patch_size=8,
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        num_labels=10,
    ),
    "swin": lambda: hf(
        "ImageClassification", "SwinConfig", lambda: images(64), image_size=64, patch_size=4,
        embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=4, num_labels=10,
    ),
    "resnet": lambda: hf(
        "ImageClassification", "ResNetConfig", lambda: images(64), num_labels=10,
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic",
    ),
    "mobilenet_v2": lambda: hf(
        "ImageClassification", "MobileNetV2Config", lambda: images(64), num_labels=10,
        image_size=64, depth_multiplier=0.5,
    ),
    "cifar_shufflenet_v2": lambda: _cifar("shufflenet_v2"),
    "cifar_resnet18": lambda: _cifar("resnet18"),
}  # fmt: skip


def measure(family: str, preset: str, cfg: Any = None, seed: int = 0) -> Row:
    """One row: a family under a preset (or under `cfg`, named so) against its exact counterpart."""
    # Gradients are what is looked at: none is released.
    cfg = [f"preset={preset}", "optim=none", "gradients=keep"] if cfg is None else cfg
    torch.manual_seed(seed)
    return {"family": family, "preset": preset, **compare(FAMILIES[family](), cfg, seed)}


def compare(case: Case, cfg: Any, seed: int = 0, *, predict: bool = True) -> Row:
    """Bytes and gradient of a case under `cfg`, beside its exact counterpart's."""
    own = [*case.model.parameters(), *case.model.buffers(), *_tensors(case.batch)]
    plain, exact = step(case, own, seed)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
    batch = case.batch if isinstance(case.batch, dict) else case.batch[0]
    predicted = float("nan")
    if predict:
        report = memtrain.audit(case.model, batch, cfg, optimizer=optimizer)
        predicted = report.totals()["saved activations"].planned
    model, optimizer = memtrain.wrap(case.model, optimizer, cfg)
    held, found = step(case, own, seed)
    memtrain.unwrap(model, optimizer)
    # Outside of the model's forward, where a loss of our own runs, nothing is intercepted.
    loss = 0 if isinstance(case.batch, dict) else _loss_nbytes(case)
    return {
        "plain_nbytes": plain - loss,
        "live_nbytes": held - loss,
        "predicted_nbytes": predicted,
        "ratio": (held - loss) / (plain - loss),
        "predicted_over_live": predicted / (held - loss),
        "gradient_cosine": cosine(found, exact),
        "gradient_error": _error(found, exact),
    }


def step(case: Case, own: list[Tensor], seed: int) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a forward leaves alive, and the gradients; the model is left as it was."""
    held: list[int] = []

    def metered() -> Tensor:
        nbytes, loss = saved_nbytes(case.loss, exclude=own)
        held.append(nbytes)
        return loss

    found = gradients(case.model, metered, seed)
    return held[0], found


def gradients(model: nn.Module, loss: Callable[[], Tensor], seed: int) -> dict[str, Tensor]:
    """The gradients of one forward and backward; the model is left as it was."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    torch.manual_seed(seed)
    loss().backward()
    model.load_state_dict(state)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _loss_nbytes(case: Case) -> int:
    """Bytes that the loss outside of the model saves."""
    images, labels = case.batch
    with torch.no_grad():
        logits = case.model(images)
    logits.requires_grad_()
    nbytes, _ = saved_nbytes(lambda: F.cross_entropy(logits, labels), exclude=[logits, labels])
    return nbytes


def _tensors(batch: dict[str, Tensor] | tuple[Tensor, Tensor]) -> list[Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def cosine(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients as one vector."""
    a = torch.cat([found[name].flatten() for name in exact])
    b = torch.cat([exact[name].flatten() for name in exact])
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Norm of the difference over that of the exact gradient."""
    squares = [
        (float((found[n] - g).square().sum()), float(g.square().sum())) for n, g in exact.items()
    ]
    return (sum(d for d, _ in squares) / sum(g for _, g in squares)) ** 0.5


def _jobs(options: Options) -> list[Job]:
    chosen = {"presets": ",".join(PRESETS), "families": ",".join(FAMILIES)}
    if options.quick:
        chosen = {"presets": "balanced", "families": "cifar_resnet18"}
    chosen = options.settings(**chosen)
    return [
        Job(f"{family}, {preset}", lambda f=family, p=preset: [measure(f, p)])
        for family in chosen["families"].split(",")
        for preset in chosen["presets"].split(",")
    ]


BENCHMARK = Benchmark(
    "families",
    "saved activations of ten model families under each preset, and their gradients",
    _jobs,
    ("family", "preset", "plain_nbytes", "ratio", "predicted_over_live", "gradient_cosine"),
)

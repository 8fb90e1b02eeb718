"""Twenty small models written from the figures of their papers, for `peaks_everywhere`.

No library's code: U-Nets, sequence to sequence, graphs, mixtures of experts, GANs, state spaces,
volumes, detection, flows, and others whose ops are called as functions.
"""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.other_models import Other


class UNet(nn.Module):
    """Ronneberger et al. 2015; `dims=3`: Cicek et al. 2016."""

    def __init__(self, width: int = 16, dims: int = 2) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.pool = F.max_pool2d if dims == 2 else F.max_pool3d
        sizes = [width, 2 * width, 4 * width]

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(conv(a, b, 3, padding=1), norm(b), nn.ReLU())

        self.down = nn.ModuleList(map(block, [4, *sizes[:-1]], sizes))
        self.up = nn.ModuleList(up(b, a, 2, 2) for a, b in itertools.pairwise(sizes))
        self.join = nn.ModuleList(block(2 * a, a) for a in sizes[:-1])
        self.head = conv(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Down, and up again beside what was there."""
        skips = []
        for number, block in enumerate(self.down):
            x = block(self.pool(x, 2) if number else x)
            skips.append(x)
        for number in (1, 0):
            x = self.join[number](torch.cat([self.up[number](x), skips[number]], 1))
        return self.head(x)


class Seq2Seq(nn.Module):
    """Sutskever et al. 2014 with the attention of Bahdanau et al. 2015, by LSTM cells."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.encoder, self.cell = nn.LSTM(width, width, batch_first=True), nn.LSTMCell(width, width)
        self.score, self.out = nn.Linear(2 * width, 1), nn.Linear(2 * width, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position."""
        memory, (h, c) = self.encoder(self.embed(tokens))
        h, c, found = h[0], c[0], []
        for step in self.embed(tokens).unbind(1):
            h, c = self.cell(step, (h, c))
            pairs = torch.cat([memory, h.unsqueeze(1).expand_as(memory)], 2)
            weights = self.score(torch.tanh(pairs)).softmax(1)
            found.append(self.out(torch.cat([h, (weights * memory).sum(1)], 1)))
        return torch.stack(found, 1)


class GraphConvolution(nn.Module):
    """Kipf and Welling 2017 over a list of edges."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        source, target = torch.randint(512, (2, 4096))
        self.register_buffer("source", source)
        self.register_buffer("target", target)

    def forward(self, x: Tensor) -> Tensor:
        """Sums over neighbours."""
        for layer in self.layers:
            messages = layer(x)[self.source]
            x = F.relu(torch.zeros_like(x).index_add(0, self.target, messages)) + x
        return x


class GraphAttention(nn.Module):
    """Velickovic et al. 2018: a softmax over the edges of a node."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)
        source, target = torch.randint(512, (2, 4096))
        self.register_buffer("source", source)
        self.register_buffer("target", target)

    def forward(self, x: Tensor) -> Tensor:
        """One layer, twice."""
        for _ in range(2):
            h = self.project(x)
            pairs = torch.cat([h[self.source], h[self.target]], 1)
            weight = F.leaky_relu(self.score(pairs), 0.2).exp()
            total = torch.zeros(len(x), 1).index_add(0, self.target, weight)
            weight = weight / (total[self.target] + 1e-9)
            x = x + torch.zeros_like(x).index_add(0, self.target, weight * h[self.source])
        return x


class Experts(nn.Module):
    """A dense mixture of Shazeer et al. 2017: every expert runs, the gate weighs."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / 8)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / 16)

    def forward(self, x: Tensor) -> Tensor:
        """Weighted sum of the best two."""
        logits = self.gate(x)
        best = logits.topk(2, -1).values[..., -1:]
        weights = logits.masked_fill(logits < best, -math.inf).softmax(-1)
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up))
        return torch.einsum("bteh,ehd,bte->btd", hidden, self.down, weights)


class Generator(nn.Module):
    """A generator and a discriminator of Radford et al. 2016, trained through each other."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.ConvTranspose2d(64, 4 * width, 4), nn.BatchNorm2d(4 * width), nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(2 * width * 64, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The judgement of what was made."""
        return self.judge(self.make(x))


class StateSpace(nn.Module):
    """A diagonal linear recurrence (Gu et al. 2022) by a convolution of spectra."""

    def __init__(self, width: int = 64, length: int = 256) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width) + 0.5)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("times", torch.arange(length).float())

    def forward(self, x: Tensor) -> Tensor:
        """Causal in time."""
        kernel = torch.exp(-self.decay[:, None] * self.times)
        u = self.first(x).transpose(1, 2)
        n = 2 * u.shape[-1]
        y = torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(kernel, n), n)[..., : n // 2]
        return self.last(F.silu(y.transpose(1, 2))) + x


class Detector(nn.Module):
    """A feature pyramid and shared heads (Lin et al. 2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        pairs = [(3, width), (width, 2 * width), (2 * width, 4 * width)]
        self.body = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.side = nn.ModuleList(nn.Conv2d(b, width, 1) for _, b in pairs)
        self.classes, self.boxes = (
            nn.Conv2d(width, 9, 3, padding=1),
            nn.Conv2d(width, 4, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Classes and boxes of all levels."""
        levels = []
        for layer in self.body:
            x = F.relu(layer(x))
            levels.append(x)
        above, found = None, []
        for x, side in zip(reversed(levels), reversed(self.side), strict=True):
            now = side(x)
            above = now if above is None else now + F.interpolate(above, scale_factor=2)
            both = self.classes(above), self.boxes(above).exp()
            found += [y.flatten(2).transpose(1, 2) for y in both]
        return torch.cat([y.sum(2) for y in found], 1)


class Coupling(nn.Module):
    """Affine couplings of a normalising flow (Dinh et al. 2017)."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        half = width // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 256), nn.ReLU(), nn.Linear(256, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The negative log-likelihood under a normal prior."""
        total = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            total = total + scale.sum(1)
        return (0.5 * x.square().sum(1) - total).mean()


class VAE(nn.Module):
    """Kingma and Welling 2014."""

    def __init__(self, width: int = 784) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(width, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decode = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, width))

    def forward(self, x: Tensor) -> Tensor:
        """The bound."""
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        loss = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="sum")
        return loss - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()


class WaveNet(nn.Module):
    """Dilated gated convolutions (van den Oord et al. 2016), weights normed."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            norm(nn.Conv1d(width, 2 * width, 2, dilation=2**k)) for k in range(6)
        )
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(6))
        self.last = nn.Conv1d(width, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next sample."""
        x, total = self.first(x), 0
        for k, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            a, b = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x = x + skip(y)
            total = total + y
        return self.last(F.relu(total))


class Attends(nn.Module):
    """Decoder blocks (Vaswani et al. 2017) by functions alone; every second one checkpointed."""

    def __init__(self, width: int = 128, depth: int = 6, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits by the embedding's weight."""
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if self.checkpoints and number % 2:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.embed.weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        parts = self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, 2)
        q, k, v = (y.view(shape).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        a, b = self.up(F.layer_norm(x, x.shape[-1:])).chunk(2, 2)
        return x + self.down(F.silu(a) * b)


class Siren(nn.Module):
    """Sines of coordinates (Sitzmann et al. 2020)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        sizes = [2, width, width, width]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Colours."""
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.last(x)


class Contrast(nn.Module):
    """SimCLR's loss (Chen et al. 2020) over a small convolutional encoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 64),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The loss of pairs."""
        z = F.normalize(self.body(torch.cat([x, x.flip(3)])), dim=1)
        scores = (z @ z.t() / 0.5).fill_diagonal_(-1e9)
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(x)))


class Highway(nn.Module):
    """Highway layers (Srivastava et al. 2015)."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Gated sums."""
        for layer in self.layers:
            h, gate = layer(x).chunk(2, 1)
            gate = torch.sigmoid(gate)
            x = gate * F.elu(h) + (1 - gate) * x
        return x


class Tabular(nn.Module):
    """Embeddings of categories beside numbers, as in wide and deep learning (Cheng et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(100, 16) for _ in range(8))
        self.deep = nn.Sequential(
            nn.Linear(8 * 16 + 16, 256), nn.PReLU(), nn.Dropout(0.2), nn.Linear(256, 64),
            nn.Softplus(), nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """A score."""
        found = [e(c) for e, c in zip(self.embed, categories.unbind(1), strict=True)]
        return self.deep(torch.cat([*found, numbers], 1))


class Perceiver(nn.Module):
    """Latents that attend to a long input (Jaegle et al. 2021)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(32, width))
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mix = nn.TransformerEncoderLayer(width, 4, 256, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        """The latents after two rounds."""
        latents = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            latents = latents + self.attend(latents, x, x, need_weights=False)[0]
            latents = self.mix(latents)
        return latents


def _text(batch: int = 8, length: int = 128) -> Tensor:
    return torch.randint(500, (batch, length))


def _squares(y: Tensor) -> Tensor:
    return y.square().mean()


def _logits(y: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), torch.zeros(y.shape[:2].numel(), dtype=torch.long))


def _mean(y: Tensor) -> Tensor:
    return y.mean()


def _per_place(y: Tensor) -> Tensor:
    return F.cross_entropy(y, torch.zeros(y.shape[0], *y.shape[2:], dtype=torch.long))


def _case(
    make: Callable[[], nn.Module], batch: Callable[[], object], loss: object
) -> Callable[[], Other]:
    return lambda: Other(make(), batch(), loss)


PAPERS: dict[str, Callable[[], Other]] = {
    "unet": _case(UNet, lambda: torch.randn(4, 4, 64, 64), _per_place),
    "unet_3d": _case(lambda: UNet(dims=3), lambda: torch.randn(2, 4, 16, 32, 32), _per_place),
    "seq2seq": _case(Seq2Seq, lambda: _text(8, 48), _logits),
    "gcn": _case(GraphConvolution, lambda: torch.randn(512, 128), _squares),
    "gat": _case(GraphAttention, lambda: torch.randn(512, 64), _squares),
    "experts": _case(Experts, lambda: torch.randn(8, 128, 64), _squares),
    "dcgan": _case(Generator, lambda: torch.randn(16, 64, 1, 1), _squares),
    "state_space": _case(StateSpace, lambda: torch.randn(8, 256, 64), _squares),
    "detector": _case(Detector, lambda: torch.randn(4, 3, 128, 128), _squares),
    "flow": _case(Coupling, lambda: torch.randn(1024, 64), _mean),
    "vae": _case(VAE, lambda: torch.rand(256, 784), _mean),
    "wavenet": _case(WaveNet, lambda: torch.randn(4, 1, 1024), _per_place),
    "functional_decoder": _case(Attends, _text, _logits),
    "half_checkpointed": _case(lambda: Attends(checkpoints=True), _text, _logits),
    "siren": _case(Siren, lambda: torch.rand(4096, 2), _squares),
    "simclr": _case(Contrast, lambda: torch.randn(8, 3, 32, 32), _mean),
    "highway": _case(Highway, lambda: torch.randn(1024, 256), _squares),
    "wide_and_deep": _case(
        Tabular, lambda: (torch.randint(100, (2048, 8)), torch.randn(2048, 16)), _squares
    ),
    "perceiver": _case(Perceiver, lambda: torch.randn(8, 512, 64), _squares),
    "channels_last": _case(
        lambda: UNet().to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 4, 64, 64).to(memory_format=torch.channels_last),
        _per_place,
    ),
}
"""Name -> makes the model, its batch and its loss."""

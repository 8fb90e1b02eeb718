"""Small models for predicted peaks, written from the figures of their papers.

A model is a function that makes its layers and says how they are connected.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(NamedTuple):
    """A model, what it is called with, and the loss of its output (None: its own, or a sum)."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None


class Layers(nn.Module):
    """Layers by name, and the function that connects them."""

    def __init__(self, connect: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.connect = connect
        for name, layer in layers.items():
            if isinstance(layer, list):
                layer = nn.ModuleList(layer)
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *args: Tensor) -> Any:
        """Whatever the function returns."""
        return self.connect(self, *args)


def squares(y: Tensor) -> Tensor:
    """Mean square of an output."""
    return y.square().mean()


def per_token(y: Tensor) -> Tensor:
    """Cross-entropy of [batch, time, classes]."""
    return F.cross_entropy(y.flatten(0, 1), torch.zeros(y.shape[:2].numel(), dtype=torch.long))


def per_place(y: Tensor) -> Tensor:
    """Cross-entropy of [batch, classes, ...]."""
    return F.cross_entropy(y, torch.zeros(y.shape[0], *y.shape[2:], dtype=torch.long))


def unet(width: int = 16, dims: int = 2, memory_format: Any = torch.contiguous_format) -> Model:
    """Ronneberger et al. 2015; `dims=3`: Cicek et al. 2016."""
    convs = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, F.max_pool2d)
    conv, up, norm, pool = (
        convs if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, F.max_pool3d)
    )
    widths = [width, 2 * width, 4 * width]

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(conv(a, b, 3, padding=1), norm(b), nn.ReLU())

    def connect(net: Any, x: Tensor) -> Tensor:
        skips = []
        for number, layer in enumerate(net.down):
            x = layer(pool(x, 2) if number else x)
            skips.append(x)
        for number in (1, 0):
            x = net.join[number](torch.cat([net.up[number](x), skips[number]], 1))
        return net.head(x)

    model = Layers(
        connect,
        down=[block(a, b) for a, b in zip([4, *widths], widths, strict=False)],
        up=[up(b, a, 2, 2) for a, b in itertools.pairwise(widths)],
        join=[block(2 * a, a) for a in widths[:-1]],
        head=conv(width, 3, 1),
    ).to(memory_format=memory_format)
    x = torch.randn(4, 4, 64, 64) if dims == 2 else torch.randn(2, 4, 16, 32, 32)
    return Model(model, x.to(memory_format=memory_format), per_place)


def seq2seq(width: int = 128) -> Model:
    """Sutskever et al. 2014 with the attention of Bahdanau et al. 2015, by LSTM cells."""

    def connect(net: Any, tokens: Tensor) -> Tensor:
        memory, (h, c) = net.encoder(net.embed(tokens))
        h, c, found = h[0], c[0], []
        for step in net.embed(tokens).unbind(1):
            h, c = net.cell(step, (h, c))
            pairs = torch.cat([memory, h.unsqueeze(1).expand_as(memory)], 2)
            weights = net.score(torch.tanh(pairs)).softmax(1)
            found.append(net.out(torch.cat([h, (weights * memory).sum(1)], 1)))
        return torch.stack(found, 1)

    model = Layers(
        connect,
        embed=nn.Embedding(500, width),
        encoder=nn.LSTM(width, width, batch_first=True),
        cell=nn.LSTMCell(width, width),
        score=nn.Linear(2 * width, 1),
        out=nn.Linear(2 * width, 500),
    )
    return Model(model, torch.randint(500, (8, 48)), per_token)


def gat(width: int = 64, nodes: int = 512) -> Model:
    """Velickovic et al. 2018: a softmax over the edges of each node, in two layers."""

    def connect(net: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            h = net.project(x)
            pairs = torch.cat([h[net.source], h[net.target]], 1)
            weight = F.leaky_relu(net.score(pairs), 0.2).exp()
            total = torch.zeros(len(x), 1).index_add(0, net.target, weight)
            weight = weight / (total[net.target] + 1e-9)
            x = x + torch.zeros_like(x).index_add(0, net.target, weight * h[net.source])
        return x

    source, target = torch.randint(nodes, (2, 4096))
    project, score = nn.Linear(width, width), nn.Linear(2 * width, 1)
    model = Layers(connect, source=source, target=target, project=project, score=score)
    return Model(model, torch.randn(nodes, width), squares)


def expert_choice(width: int = 64, n_experts: int = 8) -> Model:
    """Zhou et al. 2022: each expert takes the tokens that score highest for it."""

    def connect(net: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = net.gate(rows).softmax(1).t()
        weights, chosen = scores.topk(2 * len(rows) // n_experts, 1)
        hidden = F.silu(torch.bmm(rows[chosen], net.up))
        found = torch.bmm(hidden, net.down) * weights.unsqueeze(2)
        return x + torch.zeros_like(rows).index_add(
            0, chosen.flatten(), found.flatten(0, 1)
        ).view_as(x)

    model = Layers(
        connect,
        gate=nn.Linear(width, n_experts),
        up=nn.Parameter(torch.randn(n_experts, width, 4 * width) / 8),
        down=nn.Parameter(torch.randn(n_experts, 4 * width, width) / 16),
    )
    return Model(model, torch.randn(8, 256, width), squares)


def dcgan(width: int = 32) -> Model:
    """Radford et al. 2016: a generator, judged by a discriminator."""
    widths = [64, 4 * width, 2 * width, width]
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.ConvTranspose2d(a, b, 4, *((2, 1) if number else ())), nn.BatchNorm2d(b)]
        layers.append(nn.ReLU())
    judge = nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(2 * width * 64, 1),
    )  # fmt: skip
    generator = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
    return Model(nn.Sequential(generator, judge), torch.randn(16, 64, 1, 1), squares)


def state_space(width: int = 64, length: int = 256) -> Model:
    """Gu et al. 2022: a diagonal linear recurrence by a convolution of spectra."""

    def connect(net: Any, x: Tensor) -> Tensor:
        kernel = torch.exp(-net.decay[:, None] * net.times)
        u = net.first(x).transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length))
        return net.last(F.silu(y[..., :length].transpose(1, 2))) + x

    model = Layers(
        connect,
        decay=nn.Parameter(torch.rand(width) + 0.5),
        times=torch.arange(length).float(),
        first=nn.Linear(width, width),
        last=nn.Linear(width, width),
    )
    return Model(model, torch.randn(8, length, width), squares)


def detector(width: int = 32) -> Model:
    """Lin et al. 2017: a feature pyramid with shared heads for classes and boxes."""
    pairs = [(3, width), (width, 2 * width), (2 * width, 4 * width)]

    def connect(net: Any, x: Tensor) -> Tensor:
        levels, above, found = [], None, []
        for layer in net.body:
            x = F.relu(layer(x))
            levels.append(x)
        for level, side in zip(reversed(levels), reversed(net.side), strict=True):
            now = side(level)
            above = now if above is None else now + F.interpolate(above, scale_factor=2)
            found += [net.classes(above), net.boxes(above).exp()]
        return torch.cat([y.sum(1).flatten(1) for y in found], 1)

    model = Layers(
        connect,
        body=[nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs],
        side=[nn.Conv2d(b, width, 1) for _, b in pairs],
        classes=nn.Conv2d(width, 9, 3, padding=1),
        boxes=nn.Conv2d(width, 4, 3, padding=1),
    )
    return Model(model, torch.randn(4, 3, 128, 128), squares)


def flow(width: int = 64, layers: int = 4) -> Model:
    """Dinh et al. 2017: affine couplings; the negative log-likelihood under a normal prior."""

    def connect(net: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in net.layers:
            a, b = x.chunk(2, 1)
            scale, shift = layer(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            total = total + scale.sum(1)
        return 0.5 * x.square().sum(1) - total

    nets = [_mlp(width // 2, 256, width) for _ in range(layers)]
    return Model(Layers(connect, layers=nets), torch.randn(1024, width), torch.mean)


def _mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def vae(width: int = 784) -> Model:
    """Kingma and Welling 2014: the variational bound."""

    def connect(net: Any, x: Tensor) -> Tensor:
        mean, log_variance = net.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        loss = F.binary_cross_entropy_with_logits(net.decode(z), x, reduction="sum")
        return loss - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()

    model = Layers(connect, encode=_mlp(width, 400, 40), decode=_mlp(20, 400, width))
    return Model(model, torch.rand(1024, width), torch.mean)


def vq_vae(width: int = 64, codes: int = 256) -> Model:
    """Van den Oord et al. 2017: the nearest code, with a straight-through gradient."""

    def connect(net: Any, x: Tensor) -> Tensor:
        z = net.encode(x).permute(0, 2, 3, 1).reshape(-1, width)
        nearest = net.codes(torch.cdist(z.detach(), net.codes.weight.detach()).argmin(1))
        commit = (z - nearest.detach()).square().mean() + (z.detach() - nearest).square().mean()
        q = (z + (nearest - z).detach()).view(len(x), 16, 16, width).permute(0, 3, 1, 2)
        return (net.decode(q) - x).square().mean() + commit

    encode = nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1)
    )
    decode = nn.Sequential(
        nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
    )
    model = Layers(connect, encode=encode, decode=decode, codes=nn.Embedding(codes, width))
    return Model(model, torch.randn(16, 3, 64, 64), torch.mean)


def wavenet(width: int = 64, depth: int = 6) -> Model:
    """Van den Oord et al. 2016: dilated gated convolutions with normed weights."""

    def connect(net: Any, x: Tensor) -> Tensor:
        x, total = net.first(x), 0
        for k, (gate, skip) in enumerate(zip(net.gates, net.skips, strict=True)):
            a, b = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x, total = x + skip(y), total + y
        return net.last(F.relu(total))

    norm = nn.utils.parametrizations.weight_norm
    model = Layers(
        connect,
        first=nn.Conv1d(1, width, 1),
        gates=[norm(nn.Conv1d(width, 2 * width, 2, dilation=2**k)) for k in range(depth)],
        skips=[nn.Conv1d(width, width, 1) for _ in range(depth)],
        last=nn.Conv1d(width, 256, 1),
    )
    return Model(model, torch.randn(4, 1, 1024), per_place)


def linear_attention(width: int = 128, depth: int = 4) -> Model:
    """Katharopoulos et al. 2020: attention by sums of outer products, without a softmax."""

    def connect(net: Any, x: Tensor) -> Tensor:
        for layer, mlp in zip(net.layers, net.mlps, strict=True):
            q, k, v = (y.unflatten(2, (4, -1)) for y in layer(x).chunk(3, 2))
            q, k = F.elu(q) + 1, F.elu(k) + 1
            context = torch.einsum("bthd,bthe->bhde", k, v)
            scale = 1 / torch.einsum("bthd,bhd->bth", q, k.sum(1))
            x = x + torch.einsum("bthd,bhde,bth->bthe", q, context, scale).flatten(2)
            x = x + mlp(x)
        return x

    layers = [nn.Linear(width, 3 * width) for _ in range(depth)]
    mlps = [_mlp(width, 4 * width, width, act=nn.GELU) for _ in range(depth)]
    return Model(Layers(connect, layers=layers, mlps=mlps), torch.randn(8, 128, width), squares)


def mixer(width: int = 128, depth: int = 4) -> Model:
    """Tolstikhin et al. 2021: perceptrons over places and over channels, in turn."""

    def connect(net: Any, x: Tensor) -> Tensor:
        x = net.patches(x).flatten(2).transpose(1, 2)
        for places, channels in zip(net.places, net.channels, strict=True):
            x = x + places(F.layer_norm(x, x.shape[-1:]).transpose(1, 2)).transpose(1, 2)
            x = x + channels(F.layer_norm(x, x.shape[-1:]))
        return net.head(x.mean(1))

    model = Layers(
        connect,
        patches=nn.Conv2d(3, width, 8, 8),
        places=[_mlp(64, 256, 64, act=nn.GELU) for _ in range(depth)],
        channels=[_mlp(width, 4 * width, width, act=nn.GELU) for _ in range(depth)],
        head=nn.Linear(width, 10),
    )
    return Model(model, torch.randn(16, 3, 64, 64), per_place)


def densenet(growth: int = 16, depth: int = 6) -> Model:
    """Huang et al. 2017: each layer reads the results of all before it."""

    def connect(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        for layer in net.layers:
            x = torch.cat([x, layer(x)], 1)
        return net.head(x.mean((2, 3)))

    widths = [32 + growth * k for k in range(depth + 1)]
    layers = [
        nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, growth, 3, padding=1, bias=False))
        for a in widths[:-1]
    ]
    first, head = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(widths[-1], 10)
    model = Layers(connect, first=first, layers=layers, head=head)
    return Model(model, torch.randn(8, 3, 32, 32), per_place)


def spatial_transformer(width: int = 32) -> Model:
    """Jaderberg et al. 2015: an affine map by a network, and the picture sampled under it."""

    def connect(net: Any, x: Tensor) -> Tensor:
        maps = net.locate(x).view(-1, 2, 3) + torch.eye(2, 3).to(x)
        grid = F.affine_grid(maps, list(x.shape), align_corners=False)
        return net.classify(F.grid_sample(x, grid, align_corners=False))

    def encoder(outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(16 * width, outputs),
        )  # fmt: skip

    model = Layers(connect, locate=encoder(6), classify=encoder(10))
    return Model(model, torch.randn(8, 3, 64, 64), per_place)


def _residual(a: int, b: int) -> nn.Module:
    """A residual block of a diffusion network with a time embedding."""

    def connect(net: Any, x: Tensor, time: Tensor) -> Tensor:
        return net.skip(x) + net.second(net.first(x) + net.time(time)[:, :, None, None])

    return Layers(
        connect,
        first=nn.Sequential(nn.GroupNorm(8, a), nn.SiLU(), nn.Conv2d(a, b, 3, padding=1)),
        second=nn.Sequential(nn.GroupNorm(8, b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1)),
        time=nn.Linear(128, b),
        skip=nn.Conv2d(a, b, 1) if a != b else nn.Identity(),
    )


def diffusion_unet(width: int = 32) -> Model:
    """Ho et al. 2020: two resolutions, with attention at the lower one."""

    def connect(net: Any, x: Tensor, step: Tensor) -> Tensor:
        speeds = torch.exp(-9.2 / 64 * torch.arange(64, device=x.device))
        angles = step[:, None].to(speeds.dtype) * speeds
        time = net.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        a = net.down[0](net.first(x), time)
        b = net.down[1](net.pool(a), time)
        rows = net.norm(b).flatten(2).transpose(1, 2)
        b = b + net.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).view_as(b)
        return net.out(net.last(torch.cat([a, net.up(net.middle(b, time))], 1), time))

    model = Layers(
        connect,
        time=nn.Sequential(nn.Linear(128, 128), nn.SiLU()),
        first=nn.Conv2d(3, width, 3, padding=1),
        down=[_residual(width, width), _residual(width, 2 * width)],
        pool=nn.Conv2d(width, width, 3, 2, 1),
        norm=nn.GroupNorm(8, 2 * width),
        attention=nn.MultiheadAttention(2 * width, 4, batch_first=True),
        middle=_residual(2 * width, 2 * width),
        up=nn.ConvTranspose2d(2 * width, width, 2, 2),
        last=_residual(2 * width, width),
        out=nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1)),
    )
    noise, steps = torch.randn(8, 3, 32, 32), torch.randint(0, 1000, (8,))
    return Model(model, (torch.randn(8, 3, 32, 32), steps), lambda y: F.mse_loss(y.float(), noise))


def pointnet() -> Model:
    """Qi et al. 2017: points through shared layers, then the greatest of each channel."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise((3, 64, 128, 256)):
        layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
    head = nn.Sequential(nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    parts = {"points": nn.Sequential(*layers), "head": head}
    model = Layers(lambda net, x: net.head(net.points(x).amax(2)), **parts)
    return Model(model, torch.randn(8, 3, 1024), per_place)


PAPERS: dict[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        unet, seq2seq, gat, expert_choice, dcgan, state_space, detector, flow, vae, vq_vae, wavenet,
        linear_attention, mixer, densenet, spatial_transformer, diffusion_unet, pointnet,
    )
}  # fmt: skip
"""Name -> makes a model, its batch and its loss."""

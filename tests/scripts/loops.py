"""Scripts whose loops clip, accumulate, schedule, average, validate or call a closure.

Where a preset needs other settings for such a loop, its error names them, and the script has them.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import memtrain


def put_in(cfg, model, optimizer):
    return (model, optimizer) if cfg is None else memtrain.wrap(model, optimizer, cfg)


def digits(count, classes=4):
    """Noisy images of a few fixed patterns, and their classes."""
    targets = torch.randint(classes, (count,))
    columns = torch.arange(8)
    patterns = (columns[:, None] * (1 + targets[:, None, None]) + 2 * columns) % 5 < 2
    return patterns[:, None].float() + 0.3 * torch.randn(count, 1, 8, 8), targets


def imagenet(cfg):
    """A residual network with batch norm, momentum, weight decay, and a validation each epoch."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.convs = nn.ModuleList(
                nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
            )
            self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.relu(self.norms[0](self.convs[0](x)))
            return self.relu(self.norms[1](self.convs[1](y)) + x)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), Block(32), Block(32), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer = put_in(cfg, model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    found = []
    for _ in range(4):
        model.train()
        for _ in range(15):
            x, targets = digits(32)
            loss = F.cross_entropy(model(x), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            x, targets = digits(128)
            found.append(F.cross_entropy(model(x), targets).item())
    return found


def timm(cfg):
    """timm's loop: mixup, soft targets, a warm-up, and a moving average of the weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 64, 2, 2), nn.Flatten(2), nn.LayerNorm(16),
        nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True),
        nn.Flatten(), nn.Linear(1024, 4),
    )  # fmt: skip
    model, optimizer = put_in(cfg, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
    average = [p.detach().float().clone() for p in model.parameters()]
    found = []
    for _ in range(60):
        x, targets = digits(32)
        part = torch.distributions.Beta(0.2, 0.2).sample()
        soft = F.one_hot(targets, 4).float()
        x, soft = part * x + (1 - part) * x.flip(0), part * soft + (1 - part) * soft.flip(0)
        loss = torch.sum(-soft * model(x).log_softmax(-1), -1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p.float(), 0.1)
        found.append(loss.item())
    assert all(mean.isfinite().all() for mean in average)
    return found


def min_gpt(cfg):
    """minGPT's trainer: decay for matrices only, gradients of two batches, clipped by norm."""
    model = nn.Sequential(
        nn.Embedding(32, 64),
        *[
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        ],
        nn.LayerNorm(64),
        nn.Linear(64, 32),
    )
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decays], "weight_decay": rate}
        for decays, rate in ((True, 0.1), (False, 0.0))
    ]
    released = cfg == "all_four"
    if released:
        cfg = {"preset": "all_four", "release": {"accumulate": 2, "clip": "previous", "limit": 1}}
    model, optimizer = put_in(cfg, model, torch.optim.AdamW(groups, 2e-3, betas=(0.9, 0.95)))
    found = []
    for _ in range(40):
        total = 0.0
        for _ in range(2):
            rows = (torch.randint(32, (8, 1)) + 3 * torch.arange(17)) % 32
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.item()
        if not released:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(total)
    return found


def word_language_model(cfg):
    """torch's example: an LSTM whose state goes from batch to batch, and a tied embedding."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.lstm = nn.Embedding(32, 64), nn.LSTM(64, 64)
            self.decode = nn.Linear(64, 32)
            self.decode.weight = self.tokens.weight

        def forward(self, ids, state):
            y, state = self.lstm(F.dropout(self.tokens(ids), 0.1, self.training), state)
            return self.decode(y), state

    model = Model()
    model, optimizer = put_in(cfg, model, torch.optim.Adam(model.parameters(), 3e-3))
    text = torch.arange(16 * 61).reshape(61, 16) * 5 % 32
    found = []
    for _ in range(4):
        state = None
        for start in range(0, 60, 10):
            if state is not None:
                state = tuple(part.detach() for part in state)
            logits, state = model(text[start : start + 10], state)
            targets = text[start + 1 : start + 11]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def time_sequence(cfg):
    """torch's example: LSTM cells step by step under LBFGS, whose closure runs the model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.LSTMCell(1, 32), nn.Linear(32, 1)

        def forward(self, x):
            h = c = x.new_zeros(x.shape[1], 32)
            found = []
            for value in x:
                h, c = self.cell(value, (h, c))
                found.append(self.out(h))
            return torch.stack(found)

    starts = 6 * torch.rand(16)
    waves = (starts + torch.arange(33)[:, None] / 4).sin()[..., None]
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
    if cfg is not None:  # LBFGS has no states per parameter, and calls its closure many times
        cfg = [f"preset={'exact' if cfg == 'exact' else 'balanced'}", "optim=none"]
    model, optimizer = put_in(cfg, model, optimizer)
    found = []
    for _ in range(12):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(waves[:-1]), waves[1:])
            loss.backward()
            return loss

        found.append(optimizer.step(closure).item())
    return found


def translation(cfg):
    """torch's tutorial: an encoder and a decoder, masks of padding and of the future."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(16, 64, padding_idx=0), nn.Linear(64, 16)
            self.transformer = nn.Transformer(64, 4, 1, 1, 128, 0.0, batch_first=True)

        def forward(self, source, target):
            future = self.transformer.generate_square_subsequent_mask(target.shape[1])
            padding = torch.zeros_like(source, dtype=torch.float32).masked_fill(
                source == 0, float("-inf")
            )
            y = self.transformer(
                self.tokens(source), self.tokens(target), tgt_mask=future,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return self.head(y)

    model = Model()
    model, optimizer = put_in(cfg, model, torch.optim.Adam(model.parameters(), 1e-3))
    found = []
    for _ in range(60):
        source = torch.randint(2, 16, (16, 8))
        source[:, 6:] *= torch.randint(2, (16, 1))
        target = F.pad((source + 1) % 16 * (source > 0), (1, 0), value=1)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def hifi_gan(cfg):
    """A vocoder: weight norm, transposed convolutions, two optimizers, losses of features."""
    norm = nn.utils.parametrizations.weight_norm
    generator = nn.Sequential(
        norm(nn.Conv1d(8, 32, 7, padding=3)), nn.LeakyReLU(0.1),
        norm(nn.ConvTranspose1d(32, 16, 8, 4, 2)), nn.LeakyReLU(0.1),
        norm(nn.Conv1d(16, 1, 7, padding=3)), nn.Tanh(),
    )  # fmt: skip
    critic = nn.ModuleList(
        [norm(nn.Conv1d(1, 16, 15, 2, 7)), norm(nn.Conv1d(16, 32, 15, 4, 7)), nn.Conv1d(32, 1, 3)]
    )
    betas = (0.8, 0.99)
    makes = torch.optim.AdamW(generator.parameters(), 1e-3, betas=betas)
    judges = torch.optim.AdamW(critic.parameters(), 1e-3, betas=betas)
    generator, makes = put_in(cfg, generator, makes)
    critic, judges = put_in(cfg, critic, judges)

    def features(x):
        found = []
        for layer in critic:
            x = F.leaky_relu(layer(x), 0.1)
            found.append(x)
        return found

    found = []
    for _ in range(40):
        wave = (torch.rand(8, 1, 1) * torch.arange(128)).sin()
        fake = generator(wave.unfold(-1, 4, 4).squeeze(1).transpose(1, 2).repeat(1, 2, 1))
        error = (features(wave)[-1] - 1).square().mean()
        error = error + features(fake.detach())[-1].square().mean()
        judges.zero_grad()
        error.backward()
        judges.step()
        critic.requires_grad_(False)
        scores, real = features(fake), features(wave)
        loss = (scores[-1] - 1).square().mean() + 5 * F.l1_loss(fake, wave)
        loss = loss + sum(F.l1_loss(a, b) for a, b in zip(scores, real, strict=True))
        makes.zero_grad()
        loss.backward()
        makes.step()
        critic.requires_grad_(True)
        found.append(F.l1_loss(fake, wave).item())
    return found


def q_learning(cfg):
    """A replay buffer and a target network that is copied from the trained one."""
    model = nn.Sequential(
        nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)
    )
    target = copy.deepcopy(model).requires_grad_(False)
    released = cfg == "all_four"
    if released:
        cfg = ["preset=all_four", "release.clip=value", "release.limit=100"]
    model, optimizer = put_in(cfg, model, torch.optim.AdamW(model.parameters(), 1e-3))
    states = torch.randn(256, 8)
    actions, following = torch.randint(4, (256,)), torch.randint(256, (256,))
    rewards = (states[:, :4].argmax(1) == actions).float()
    found = []
    for step in range(80):
        if step % 10 == 0:
            target.load_state_dict(model.state_dict())
        batch = torch.randint(256, (64,))
        with torch.no_grad():
            best = rewards[batch] + 0.5 * target(states[following[batch]]).amax(1)
        values = model(states[batch]).gather(1, actions[batch, None]).squeeze(1)
        loss = F.smooth_l1_loss(values, best)
        optimizer.zero_grad()
        loss.backward()
        if not released:
            nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()
        found.append(loss.item())
    return found


LOOPS = (
    imagenet, timm, min_gpt, word_language_model, time_sequence,
    translation, hifi_gan, q_learning,
)  # fmt: skip

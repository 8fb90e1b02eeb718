"""A small language model, ways to compile it, and what the nodes of its graph hold."""

import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.compile_fx import compile_fx

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from tests.graphs import graph_nodes

# inductor's partition of a graph, run op by op: nothing is generated
BACKEND = aot_autograd(fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)


def decomposing(graph, inputs):
    """A backend with inductor's passes too, by which a ReLU's backward is a comparison."""

    return compile_fx(graph, inputs, inner_compile=lambda graph, ins, **_: boxed_nop(graph, ins))


class Attention(nn.Module):
    scale: float | None = None

    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        samples, tokens, width = x.shape
        heads = (samples, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(y.transpose(1, 2).reshape(samples, tokens, width))


class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self, blocks=1, width=64):
        super().__init__()
        self.wte = nn.Embedding(50, width)
        self.h = nn.ModuleList(Block(width) for _ in range(blocks))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def tokens(length=64):
    return torch.randint(0, 50, (2, length))


def wrapped(model, cfg="balanced"):
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)


def held(output, *others):
    """Bytes that the output's graph holds, found in its nodes; `others` live without it."""
    saved = [tensor for node in graph_nodes(output) for tensor in _saved(node)]
    return storage_nbytes(saved, exclude=[output, *others])


def _saved(node):
    if hasattr(node, "saved_tensors"):
        return [tensor for tensor in node.saved_tensors if tensor is not None]
    found = []
    for name in dir(node):
        if name.startswith("_raw_saved"):
            handle = getattr(getattr(node, name), "data", None)
            entry, content = (getattr(handle, part, None) for part in ("entry", "_content"))
            if entry is not None:
                found += entry.packed.tensors.values()
            elif content is not None:  # copies of a norm's weight and bias
                found += [x for x in content.args[-1][1:] if x is not None]
            elif isinstance(handle, torch.Tensor):
                found.append(handle)
    return found


def planned(model):
    rows = memtrain.plan_of(model).entries("activation")
    return sum(row.planned for row in rows), sum(row.nbytes for row in rows)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def compiled(model, how):
    """Compile a wrapped model in one of the ways that users do."""
    if how == "torch.compile":
        return torch.compile(model, backend=BACKEND, fullgraph=True)
    if how == "model.compile":
        model.compile(backend=BACKEND)
    elif how == "each block":
        for block in model.h:
            block.compile(backend=BACKEND, fullgraph=True)
    elif how == "a function":
        return torch.compile(lambda x: model(x), backend=BACKEND, fullgraph=True)
    return model

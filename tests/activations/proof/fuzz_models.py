"""Random models: a program of ops and statements on a pool of tensors, from a seed.

    python -m tests.activations.proof.fuzz_models SEED [COUNT] [--shrink]

compares the models of the seeds with the baseline, and prints the program of each that fails;
with `--shrink` the shortest program found that still fails.
"""

import ctypes
import random
import sys
import threading
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.activations.proof.fuzz_ops import OPS, ROWS, SAFE, WIDTH


class Broken(Exception):
    """What a program raises by itself."""


@dataclass
class Instruction:
    """One op or statement.

    Args:
        kind: An op of `OPS` or a statement.
        number: Its own, which also draws its details.
        a: Position in the pool of the first operand, from the end.
        b: Of the second.
        body: Instructions inside.
    """

    kind: str
    number: int
    a: int
    b: int
    body: list["Instruction"] = field(default_factory=list)

    def lines(self, depth=0):
        yield f"{'    ' * depth}{self.kind} #{self.number} {self.a} {self.b}"
        for each in self.body:
            yield from each.lines(depth + 1)


WRITES = {
    "mul_": lambda t: t.mul_(0.9),
    "view zero_": lambda t: t[:, 3:9].zero_(),
    "strided add_": lambda t: t.view(-1)[::3].add_(0.1),
    "transposed mul_": lambda t: t.t().mul_(1.1),
    "copy_": lambda t: t.copy_(t.roll(1, 0)),
    "index_put_": lambda t: t.__setitem__((slice(None), 2), 0.5),
}
"""Writes that the version counter sees."""


def _by_address(t):
    buffer = (ctypes.c_float * t.numel()).from_address(t.data_ptr())
    for i in range(0, t.numel(), 5):
        buffer[i] = 0.25


HIDDEN = {
    "data clamp_": lambda t: t.data.clamp_(-0.1, 0.1),
    "data slice": lambda t: t.data[:, :16].zero_(),
    "detach mul_": lambda t: t.detach().mul_(0.5),
    "numpy": lambda t: t.detach().numpy().__imul__(0.5),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).mul_(-1.0),
    "address": _by_address,
    "set_": lambda t: torch.empty(0).set_(t.detach().untyped_storage()).mul_(0.5),
    "no_grad": lambda t: _without_grad(t),
}
"""Writes past it, most of them."""


def _without_grad(t):
    with torch.no_grad():
        t.mul_(0.7)


BLOCKS = (
    *("branch", "data branch", "loop", "checkpoint", "reentrant"),
    *("thread", "dropped", "no_grad", "caught", "function"),
)
RIGHT_AFTER = tuple(f"hidden {name}" for name in HIDDEN)


def program_of(seed):
    """The program of a seed: 4 to 14 instructions, with bodies."""
    rng = random.Random(seed)
    count = iter(range(1, 1000))
    return _block(rng, count, rng.randint(4, 14), 0)


def _block(rng, count, length, depth):
    own = []
    while len(own) < length:
        number = next(count)
        a, b = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 2, 2, 3, 5))
        chance = rng.random()
        if chance < 0.62:
            own.append(Instruction(rng.choice(list(OPS)), number, a, b))
        elif chance < 0.80 and depth < 2:
            body = _block(rng, count, rng.randint(1, 4), depth + 1)
            own.append(Instruction(rng.choice(BLOCKS), number, a, b, body))
        elif chance < 0.86:
            own.append(Instruction(f"write {rng.choice(list(WRITES))}", number, a, b))
        elif chance < 0.95:
            own.append(Instruction(rng.choice(list(SAFE)), number, a, b))
            own.append(Instruction(rng.choice(RIGHT_AFTER), next(count), 1, b))
        elif chance < 0.975:
            own.append(Instruction("raise", number, a, b))
        else:
            own.append(Instruction("inner backward", number, a, b))
    return own


class Random(nn.Module):
    """Runs a program; equal for equal programs."""

    def __init__(self, program):
        super().__init__()
        self.program, self.modules_of = program, nn.ModuleDict()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.now = 0
        for each in _all(program):
            self._make(each)

    def _make(self, at):
        self._building = True
        x = torch.zeros(ROWS, WIDTH)
        if at.kind in OPS:
            torch.manual_seed(at.number)
            with torch.no_grad():
                OPS[at.kind](self, at, x, x)
        self._building = False

    def module(self, at, make):
        """The module of an instruction."""
        name = f"m{at.number}"
        if self._building and name not in self.modules_of:
            self.modules_of[name] = make()
        return self.modules_of[name]

    def forward(self, x, now):
        self.now, pool = now, [self.first(x)]
        self.run(self.program, pool)
        return sum(pool[-3:]) + 0.1 * pool[0]

    def run(self, block, pool):
        for at in block:
            getattr(self, f"_{at.kind.replace(' ', '_')}", self._other)(at, pool)

    def _other(self, at, pool):
        a, b = (pool[-min(i, len(pool))] for i in (at.a, at.b))
        if at.kind in OPS:
            pool.append(OPS[at.kind](self, at, a, b))
            return
        kind, _, name = at.kind.partition(" ")
        if kind == "write":
            WRITES[name](a)
        elif kind == "hidden":
            HIDDEN[name](pool[-1])
        else:
            raise AssertionError(at.kind)

    def _branch(self, at, pool):
        if (self.now + at.number) % 2:
            self.run(at.body, pool)

    def _data_branch(self, at, pool):
        if float(pool[-1].detach().mean()) > 0:
            self.run(at.body, pool)
        else:
            pool.append(pool[-1] * 0.5)

    def _loop(self, at, pool):
        for _ in range(1 + (at.number + self.now) % 3):
            self.run(at.body, pool)

    def _isolated(self, at, x):
        pool = [x]
        self.run(at.body, pool)
        return pool[-1] * 1

    def _function(self, at, pool):
        pool.append(self._isolated(at, pool[-1]))

    def _checkpoint(self, at, pool):
        pool.append(checkpoint(self._isolated, at, pool[-1] * 1, use_reentrant=False))

    def _reentrant(self, at, pool):
        pool.append(checkpoint(self._isolated, at, pool[-1] * 1, use_reentrant=True))

    def _thread(self, at, pool):
        out = []

        def work():
            try:
                out.append(self._isolated(at, pool[-1]))
            except Exception as error:  # noqa: BLE001 - handed on
                out.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(out[0], Exception):
            raise out[0]
        pool.append(out[0])

    def _dropped(self, at, pool):
        self._isolated(at, pool[-1] * 1)

    def _no_grad(self, at, pool):
        with torch.no_grad():
            offset = self._isolated(at, pool[-1] * 1)
        pool.append(pool[-1] + offset)

    def _caught(self, at, pool):
        try:
            self._isolated(at, pool[-1] * 1)
            raise Broken
        except Broken:
            pool.append(pool[-1] * 0.8)

    def _raise(self, at, pool):
        if self.now == at.number % 4:
            raise Broken

    def _inner_backward(self, at, pool):
        if pool[-1].requires_grad:
            torch.autograd.grad(pool[-1].sum(), self.first.weight, retain_graph=True)


def _all(block):
    for each in block:
        yield each
        yield from _all(each.body)


def shrink(program, fails):
    """Take instructions out, as long as the program still fails."""
    found = True
    while found:
        found = False
        for block in [program, *(each.body for each in _all(program))]:
            for i in reversed(range(len(block))):
                each = block.pop(i)
                if fails(program):
                    found = True
                    break
                block.insert(i, each)
                if each.body:  # its body in its place
                    block[i : i + 1] = each.body
                    if fails(program):
                        found = True
                        break
                    block[i : i + len(each.body)] = [each]
            if found:
                break
    return program


def main():
    from tests.activations.proof.fuzz_compare import failure

    numbers = [int(x) for x in sys.argv[1:] if x.isdigit()]
    seed, count = numbers[0], (*numbers[1:], 1)[0]
    failed = 0
    for each in range(seed, seed + count):
        program = program_of(each)
        found = failure(program, each)
        if not found:
            continue
        failed += 1
        if "--shrink" in sys.argv:
            kind = found.split(":")[0]
            program = shrink(program, lambda p, k=kind, s=each: failure(p, s).split(":")[0] == k)
            found = failure(program, each)
        lines = [f"seed {each}: {found}", *(line for at in program for line in at.lines(1))]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{count - failed} of {count} models are right\n")


if __name__ == "__main__":
    main()

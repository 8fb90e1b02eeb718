"""Random models beside the baseline: a hundred in CI, 10,000 nightly.

A model is a program of the known-op table's ops, with control flow, writes in place that the
version counter sees or not, views, dropped graphs, exceptions, checkpointing and threads. Under
`exact` each step has the baseline's values, gradients or error; under `balanced` its values, and
gradients that are finite where the baseline's are; at 8 bits no gradient is further from the exact
one than `fuzz_compare.WIDER` times the worst of an independent counterpart, which rounds every
saved tensor of the baseline to 8 bits.
"""

import random

import pytest

from tests.activations.proof.fuzz_compare import failure
from tests.activations.proof.fuzz_models import BLOCKS, OPS, Instruction, program_of, shrink

IN_CI, NIGHTLY, AT_ONCE = 100, 10_000, 20


def batches():
    for first in range(0, NIGHTLY, AT_ONCE):
        late = [pytest.mark.nightly] * (first >= IN_CI)
        yield pytest.param(first, id=f"seeds {first} to {first + AT_ONCE - 1}", marks=late)


@pytest.mark.parametrize("first", list(batches()))
def test_random_models_train_as_the_baseline(first, record_property):
    wrong = {}
    for seed in range(first, first + AT_ONCE):
        found = failure(program_of(seed), seed)
        if found:
            wrong[seed] = found
    record_property("random models", {"right": AT_ONCE - len(wrong), "wrong": len(wrong)})
    assert not wrong, "\n".join(
        f"{found}\n    python -m tests.activations.proof.fuzz_models {seed} --shrink"
        for seed, found in wrong.items()
    )


def test_programs_are_of_their_seed_and_have_all_kinds():
    kinds = set()
    for seed in range(600):
        lines = [line for at in program_of(seed) for line in at.lines()]
        assert lines == [line for at in program_of(seed) for line in at.lines()]
        kinds |= {line.strip().split(" #")[0] for line in lines}
    assert set(OPS) | set(BLOCKS) <= kinds


def test_a_failing_program_is_shrunk_to_what_fails():
    rng = random.Random(0)
    noise = [Instruction("loop", i, 1, 1, [Instruction("gelu", 100 + i, 1, 1)]) for i in range(4)]
    guilty = Instruction("caught", 50, 1, 1, [Instruction("exp", 51, 1, 1)])
    program = [*noise[:2], guilty, *noise[2:]]
    rng.shuffle(program)

    def fails(found):
        return any("exp" in line for at in found for line in at.lines())

    assert [line for at in shrink(program, fails) for line in at.lines()] == ["exp #51 1 1"]

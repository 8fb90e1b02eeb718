"""`memtrain-report memory=24GiB`: the largest batch and the longest sequence that fit."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.largest import largest
from memtrain.cli.models.families import FAMILIES
from memtrain.cli.models.models import Built
from memtrain.cli.report.request_fields import Request
from memtrain.config.sizes import format_size
from memtrain.config.sources import Config

WORDS = {"batch": "largest batch", "seq": "longest sequence"}
_MOST = 2**20


@dataclass(frozen=True)
class Fits:
    """Sizes whose predicted peak is within a memory."""

    memory: int
    """Bytes."""
    sizes: Mapping[str, tuple[int, int]]
    """`batch`, and for text `seq`: the largest size in plain PyTorch and with the plan, all else as
    asked for; 0 where not even 1 fits."""
    most: Mapping[str, int]
    """The sizes beyond which nothing was tried."""

    def lines(self) -> list[str]:
        """As printed.

        Example:
            >>> Fits(2**30, {"batch": (3, 12)}, {"batch": 99}).lines()
            ['in 1.00 GiB, largest batch: 3 plain, 12 planned']
        """
        return [
            f"in {format_size(self.memory)}, {WORDS[what]}: "
            f"{self._word(what, plain)} plain, {self._word(what, planned)} planned"
            for what, (plain, planned) in self.sizes.items()
        ]

    def _word(self, what: str, size: int) -> str:
        if not size:
            return "none"
        return f"{size:,}" + (" (the model's limit)" if size == self.most[what] else "")


def fits(
    built: Built,
    request: Request,
    config: Config,
    options: StepOptions,
    working: Callable[[str], AbstractContextManager[None]],
) -> Fits:
    """Search on the predicted peak.

    Args:
        built: Model, optimizer and a batch.
        request: Its `memory`; `seq` is searched for models that take text.
        config: The plan.
        options: Of the step.
        working: Is told what goes on.

    Returns:
        The sizes.

    Raises:
        ValueError: For a batch that does not tell its size.
    """
    memory = request.memory_nbytes or 0
    family = FAMILIES.get(request.model)
    most = {"batch": _MOST}
    if isinstance(built.batch, dict) and "input_ids" in built.batch:
        own = getattr(getattr(built.model, "config", None), "max_position_embeddings", None)
        longest = family.longest if family else own
        most["seq"] = longest or _MOST
    sizes = {}
    for what, limit in most.items():
        found = []
        for side, cfg in (("plain", None), ("planned", config)):
            with working(f"searching the {WORDS[what]} that fits, {side}"):
                sized = largest(*built, memory, cfg, what=what, most=limit, options=options)
            found.append(sized.size)
        sizes[what] = (found[0], found[1])
    return Fits(memory, sizes, most)

"""A forward under each scheme: what is saved, and what the scheme says of each site."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from memtrain.activations.saved.site import Record, Site
from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import KEEP
from memtrain.plan.plan import Plan
from memtrain.plan.rules import activation_rules as rules_of
from memtrain.planner.levels import CODES, GROUPS, NARROW, SCHEMES, Widths, activation_rules


class Trace:
    """The records of a forward, and what the rules say of each site that they were asked about."""

    def __init__(self, records: list[Record], choices: dict[Site, Compressor | Keep]) -> None:
        self.records, self.choices = records, choices


class Traces:
    """Traces of one model and batch; schemes that choose alike have one.

    Args:
        plan: Its config's exceptions hold under every scheme; its rules do not.
        model: Real or fake; not changed.
        batch: What it is called with.
        quantise: Whether there are other schemes than `keep`.

    Example:
        >>> import torch
        >>> from memtrain.plan.plan import make_plan
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> plan = make_plan(model, torch.optim.SGD(model.parameters()))
        >>> found = Traces(plan, model, torch.ones(64, 64), quantise=True)
        >>> found.at["patches"] is found.at["codes"], found.at["codes"] is found.at["keep"]
        (True, False)
    """

    def __init__(self, plan: Plan, model: nn.Module, batch: Any, *, quantise: bool) -> None:
        self._plan, self._model, self._batch = plan, model, batch
        self._made: list[Trace] = []
        self.at = {name: self._trace(name) for name in (SCHEMES if quantise else (KEEP,))}
        """By scheme, at the default widths."""
        pairs = (CODES, GROUPS) if quantise else ()
        self.narrow = {name: self._trace(name, NARROW) for name in pairs}
        """Of schemes that others borrow the bytes of each width from."""

    def __iter__(self) -> Iterator[Trace]:
        """All that were made."""
        return iter(self._made)

    def _trace(self, scheme: str, widths: Widths = Widths()) -> Trace:  # noqa: B008
        plan = self.under(scheme, widths)
        for known in self._made:
            if all(plan.choose_activation(site) == own for site, own in known.choices.items()):
                return known
        choices: dict[Site, Compressor | Keep] = {}

        def choose(site: Site) -> Compressor | Keep:
            choices[site] = plan.choose_activation(site)
            return choices[site]

        records = plan.trace(self._model, self._batch, choose)
        self._made.append(Trace(records, choices))
        return self._made[-1]

    def under(self, scheme: str, widths: Widths = Widths()) -> Plan:  # noqa: B008
        """A plan for saved tensors with a scheme's rules.

        Args:
            scheme: One of `SCHEMES`.
            widths: Of its codes and groups.

        Returns:
            The plan; it knows nothing of states.
        """
        config = self._plan.config
        rules = activation_rules(scheme, widths)
        own = replace(config.activations, rules=rules, sites={}, recompute=[])
        config = replace(config, activations=own)
        paths = [name for name, _ in self._model.named_modules()]
        plan = replace(
            self._plan,
            config=config,
            activation_rules=rules_of(own, paths),
            _entries={},
        )
        return replace(plan, bits=plan.automatic_bits())

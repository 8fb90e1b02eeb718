"""Rules x sites -> plan: what is done to every site, decided before anything runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf
from torch import nn
from torch.optim import Optimizer

from memtrain.activations.bits import Bits
from memtrain.activations.families import FAMILIES
from memtrain.activations.options import Options
from memtrain.activations.sites import Record, Site
from memtrain.activations.trace import trace
from memtrain.build import build
from memtrain.compressors import Compressor
from memtrain.compressors.auto import Auto
from memtrain.config import ActivationRule, Config, StateRule, load, nearest
from memtrain.entry import Entry
from memtrain.optim.layout import is_unsigned
from memtrain.parameters import predict_gradients, predict_weights, training_dtypes
from memtrain.states import predict_states

NO_RULE = "no rule matches"


def expand(text: str) -> tuple[str, ...]:
    """A rule's pattern as globs: `|` separates them, `@name` stands for a family of ops.

    Raises:
        ValueError: For an unknown family.

    Example:
        >>> expand("linear|@exponential")
        ('linear', 'cross_entropy', 'log_softmax', 'logsumexp')
    """
    patterns: list[str] = []
    for pattern in text.split("|"):
        if pattern.startswith("@") and pattern not in FAMILIES:
            raise ValueError(f"unknown family of ops {pattern!r}; {nearest(pattern, [*FAMILIES])}")
        patterns += FAMILIES.get(pattern, (pattern,))
    return tuple(patterns)


class Rules:
    """Ordered rules over names; the first whose every pattern matches wins.

    Args:
        exceptions: The user's rules, tried first.
        rules: The preset's rules.
        names: The fields of a rule that are patterns, in the order of `choose`'s arguments.
    """

    def __init__(
        self,
        exceptions: Sequence[ActivationRule | StateRule],
        rules: Sequence[ActivationRule | StateRule],
        names: Sequence[str],
    ) -> None:
        given = (*exceptions, *rules)
        self._texts = [", ".join(str(getattr(rule, name)) for name in names) for rule in given]
        self._rules = [
            (
                tuple(expand(str(getattr(rule, name))) for name in names),
                {signed: build(rule.compressor, signed=signed) for signed in (True, False)},
            )
            for rule in given
        ]
        self._first: dict[tuple[str, ...], int] = {}  # names -> the rule that wins

    def choose(self, *names: str, signed: bool = True) -> Compressor | str:
        """The compressor for a site, or the reason to keep it."""
        return self.choose_any([names], signed=signed)

    def choose_any(
        self, alternatives: Iterable[tuple[str, ...]], *, signed: bool = True
    ) -> Compressor | str:
        """The same for a site of several names (a tied weight): the earliest rule of any wins."""
        first = min(map(self._winner, alternatives))
        return NO_RULE if first == len(self._rules) else self._rules[first][1][signed]

    def compressors(self) -> list[Compressor | str]:
        """What the rules choose among."""
        return [chosen for _, signs in self._rules for chosen in signs.values()]

    def unused(self) -> list[str]:
        """The patterns of the rules that have won no site so far."""
        won = set(self._first.values())
        return [text for index, text in enumerate(self._texts) if index not in won]

    def _winner(self, names: tuple[str, ...]) -> int:
        if names not in self._first:
            matching = (
                index
                for index, (patterns, _) in enumerate(self._rules)
                if all(map(_matches, names, patterns))
            )
            self._first[names] = next(matching, len(self._rules))
        return self._first[names]

    def __bool__(self) -> bool:
        return bool(self._rules)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Plan:
    """Site -> compressor, or keep with the reason.

    Without a batch, activation sites are settled by the first training forward; what a site was
    settled to stays.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 128)
        >>> plan = make_plan(model, torch.optim.AdamW(model.parameters()), "balanced")
        >>> plan.entries("gradient")[0].reason
        'not requested'
    """

    config: Config
    activation_rules: Rules
    state_rules: Rules
    _entries: dict[str, list[Entry]] = field(default_factory=dict)
    _aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of tied parameters
    bits: Bits | None = None
    """The widths of the sites with `bits: auto`, if a rule has it."""

    @property
    def options(self) -> Options:
        """How saved tensors are handled, whatever their compressors."""
        own = self.config.activations
        return Options(
            min_elements=own.min_elements,
            derive_outputs=own.derive_outputs,
            backward_bytes=own.backward_bytes,
        )

    def choose_activation(self, site: Site) -> Compressor | str:
        """The compressor for a saved tensor's site, or the reason to keep it."""
        chosen = self.activation_rules.choose(*site)
        if isinstance(chosen, Auto) and self.bits is not None:
            return self.bits.resolve(site, chosen)
        return chosen

    def choose_state(self, parameter: str, state: str) -> Compressor | str:
        """The compressor for a parameter's state, or the reason to keep it."""
        names = self._aliases.get(parameter, (parameter,))
        alternatives = [(name, state) for name in names]
        return self.state_rules.choose_any(alternatives, signed=not is_unsigned(state))

    def settle(self, records: Iterable[Record]) -> None:
        """Add the activation sites of a forward; those that are settled already stay.

        A site whose automatic bits have changed since is settled again.
        """
        new = {entry.site: entry for entry in merge(records)}
        stale = self.bits.stale if self.bits is not None else set()
        rows = self._entries.setdefault("activation", [])
        rows[:] = [new.get(row.site, row) if row.site in stale else row for row in rows]
        stale -= new.keys()
        known = {row.site for row in rows}
        rows += [entry for site, entry in new.items() if site not in known]

    def trace(
        self,
        model: nn.Module,
        batch: Any,
        choose: Callable[[Site], Compressor | str] | None = None,
    ) -> list[Record]:
        """What a forward would save under the plan, or under `choose`; the plan is not changed."""
        chosen = choose or self.choose_activation
        return trace(model, batch, chosen, self.options, training_dtypes(model, self.config))

    def unused(self) -> dict[str, list[str]]:
        """Rules that have matched nothing so far, by what they are for."""
        return {
            "activations": self.activation_rules.unused(),
            "optim": self.state_rules.unused(),
        }

    def entries(self, kind: str = "") -> list[Entry]:
        """The plan's rows, of one kind or all; no activations before they are settled."""
        kinds = [kind] if kind else ["weight", "gradient", "state", "activation"]
        return [entry for name in kinds for entry in self._entries.get(name, [])]

    def to_yaml(self) -> str:
        """The plan as YAML: for each kind and site the compressor, or `keep` with the reason."""
        tree: dict[str, dict[str, str]] = {}
        for entry in self.entries():
            what = entry.compressor or f"keep: {entry.reason}"
            tree.setdefault(entry.kind, {})[entry.site] = what
        for part, rules in self.unused().items():
            if rules:
                tree.setdefault("matched nothing", {})[part] = "; ".join(rules)
        return OmegaConf.to_yaml(OmegaConf.create(tree))

    def __str__(self) -> str:
        return self.to_yaml()


def make_plan(
    model: nn.Module, optimizer: Optimizer, cfg: Any = None, *, batch: Any = None
) -> Plan:
    """Decide what is done to every site; nothing is changed.

    Args:
        model: The model.
        optimizer: Its optimizer.
        cfg: Anything that `memtrain.config.load` takes.
        batch: What the model is called with: settles the activation sites by a forward on fake
            tensors. Without it the first training forward of a wrapped model settles them.

    Returns:
        The plan.

    Raises:
        ValueError: For a config that `load` refuses, an unknown compressor, or an exception (a
            rule of the user's) whose module or parameter does not exist.
        TypeError: For values of the wrong type.
    """
    config = load(cfg)
    modules = [name for name, _ in model.named_modules()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_exceptions(config.activations.exceptions, "module", modules)
    _check_exceptions(config.optim.exceptions, "parameter", list(parameters))
    plan = Plan(
        config,
        Rules(config.activations.exceptions, config.activations.rules, ("module", "op", "tensor")),
        Rules(config.optim.exceptions, config.optim.rules, ("parameter", "state")),
        _aliases=_aliases(parameters),
    )
    plan = replace(plan, bits=automatic_bits(plan))
    plan._entries["weight"] = predict_weights(model, optimizer, config)
    plan._entries["gradient"] = predict_gradients(model, optimizer, config)
    plan._entries["state"] = predict_states(model, optimizer, plan)
    if batch is not None:
        plan.settle(plan.trace(model, batch))
    return plan


def activation_plan(model: nn.Module, cfg: Any = None) -> Plan:
    """The part of a plan that is for saved tensors; it needs no optimizer.

    Args:
        model: The model.
        cfg: Anything that `memtrain.config.load` takes.

    Returns:
        A plan whose activation sites are not settled yet.

    Raises:
        ValueError: As `make_plan`.
        TypeError: As `make_plan`.
    """
    config = load(cfg)
    own = config.activations
    _check_exceptions(own.exceptions, "module", [name for name, _ in model.named_modules()])
    rules = Rules(own.exceptions, own.rules, ("module", "op", "tensor"))
    plan = Plan(config, rules, Rules([], [], ("parameter", "state")))
    return replace(plan, bits=automatic_bits(plan))


def automatic_bits(plan: Plan) -> Bits | None:
    """The widths that a plan's rules with `bits: auto` start with; None if no rule has it.

    Raises:
        ValueError: If such a rule has no `average_bits`, or is for optimizer states.
    """
    if any(isinstance(chosen, Auto) for chosen in plan.state_rules.compressors()):
        raise ValueError("bits='auto' in a rule of optim; allowed: in those of activations")
    if not any(isinstance(chosen, Auto) for chosen in plan.activation_rules.compressors()):
        return None
    average = plan.config.activations.average_bits
    if average is None:
        raise ValueError("bits='auto' needs activations.average_bits; allowed: 1 to 8")
    return Bits(average)


def _aliases(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in parameters.items():
        names[parameter] = (*names.get(parameter, ()), name)
    return {name: tied for tied in names.values() for name in tied if len(tied) > 1}


def merge(records: Iterable[Record]) -> Iterable[Entry]:
    """One entry per site: the sums over its saves."""
    sites: dict[Site, list[Record]] = {}
    for record in records:
        sites.setdefault(record.site, []).append(record)
    for site, rows in sites.items():
        shown = next((row for row in rows if row.compressor), rows[0])
        yield Entry(
            site.name,
            "activation",
            sum(row.nbytes for row in rows),
            sum(row.planned for row in rows),
            shown.compressor,
            "" if shown.compressor else shown.reason,
        )


def _check_exceptions(rules: Sequence[Any], what: str, names: Sequence[str]) -> None:
    for index, rule in enumerate(rules):
        patterns = str(getattr(rule, what)).split("|")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"exceptions[{index}].{what}={pattern!r} matches no {what} of the model; "
                    f"{nearest(pattern, names)[:500]}"
                )

"""Ordered rules (patterns over names), and a plan's exact sites before them."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from memtrain.activations.intercept.op_families import FAMILIES
from memtrain.activations.intercept.recompute import BLOCKS
from memtrain.activations.saved.site import CHECKPOINT_INPUT, NO_RULE, Site
from memtrain.compressors import Compressor, Keep, check_role
from memtrain.compressors.auto import Auto
from memtrain.compressors.base import ACTIVATION, CHECKPOINTED_INPUT, STATE
from memtrain.config.sources import KEEP, Activations, Optim, nearest
from memtrain.plan.compressor_specs import build_compressor


def expand(text: str) -> tuple[str, ...]:
    """Expand a rule's pattern to globs: `|` separates globs, `@name` is a family of ops.

    Example:
        >>> expand("linear|@exponential")
        ('linear', 'cross_entropy', 'log_softmax')
    """
    patterns: list[str] = []
    for pattern in text.split("|"):
        if pattern.startswith("@") and pattern not in FAMILIES:
            raise ValueError(f"unknown family of ops {pattern!r}; {nearest(pattern, [*FAMILIES])}")
        patterns += FAMILIES.get(pattern, (pattern,))
    return tuple(patterns)


class Rules:
    """Ordered rules over names; the first rule whose every pattern matches wins.

    A plan's `sites` come before the user's `exceptions` and the config's `rules`.
    """

    def __init__(self, config: Activations | Optim) -> None:
        saved = isinstance(config, Activations)
        part = "activations" if saved else "optim"
        names = ("module", "op", "tensor") if saved else ("parameter", "state")
        self._sites: dict[tuple[str, ...], dict[bool, Compressor | Keep]] = {}
        for site, value in config.sites.items():
            key = tuple(Site.parse(site)) if saved else state_site(site)
            self._sites[key] = _signs(value, f"{part}.sites.{site!r}")
        self._rules: list[tuple[list[tuple[str, ...]], dict[bool, Compressor | Keep]]] = []
        for kind in ("exceptions", "rules"):
            for index, rule in enumerate(getattr(config, kind)):
                patterns = [expand(str(getattr(rule, name))) for name in names]
                where = f"{part}.{kind}.{index}.compressor"
                self._rules.append((patterns, _signs(rule.compressor, where)))
        self._exceptions = [
            " ".join(f"{name}={x}" for name in names if (x := str(getattr(rule, name))) != "*")
            for rule in config.exceptions
        ]
        self._matched: dict[tuple[str, ...], int] = {}  # names -> the winning rule

    def choose(self, names: tuple[str, ...], *, signed: bool = True) -> Compressor | Keep:
        """Return the compressor for a site, or the reason to keep it."""
        if names in self._sites:
            return self._sites[names][signed]
        first = self._first_match(names)
        return NO_RULE if first == len(self._rules) else self._rules[first][1][signed]

    def is_exception(self, names: tuple[str, ...]) -> bool:
        """Return whether a rule of the user's matches a site."""
        return self._first_match(names) < len(self._exceptions)

    def choose_tied(
        self, alternatives: Sequence[tuple[str, ...]], *, signed: bool = True
    ) -> Compressor | Keep:
        """Choose for a site with several names (a tied weight): the first matching rule wins."""
        exact = [names for names in alternatives if names in self._sites]
        return self.choose((exact or [min(alternatives, key=self._first_match)])[0], signed=signed)

    def compressors(self) -> list[Compressor | Keep]:
        """Return every compressor that the rules may choose."""
        signs = [*self._sites.values(), *(signs for _, signs in self._rules)]
        return [chosen for each in signs for chosen in each.values()]

    def check(self, role: str) -> None:
        """Raise ValueError for a compressor that cannot serve this role."""
        for chosen in self.compressors():
            if not isinstance(chosen, Keep):
                check_role(chosen, role)

    def idle_exceptions(self) -> list[str]:
        """Return the user's rules that have not won at any site, such as `2: op=gelo`."""
        won = set(self._matched.values())
        listed = enumerate(self._exceptions)
        return [f"{index}: {text or 'everything'}" for index, text in listed if index not in won]

    def _first_match(self, names: tuple[str, ...]) -> int:
        if names not in self._matched:
            matching = (
                index
                for index, (patterns, _) in enumerate(self._rules)
                if all(map(matches, names, patterns))
            )
            self._matched[names] = next(matching, len(self._rules))
        return self._matched[names]

    def __bool__(self) -> bool:
        """Return whether any rule compresses."""
        exact = (chosen for signs in self._sites.values() for chosen in signs.values())
        return bool(self._rules) or any(not isinstance(chosen, Keep) for chosen in exact)


def _signs(value: Any, where: str) -> dict[bool, Compressor | Keep]:
    """Return the compressors for tensors with and without negative values."""
    try:
        return {signed: build_compressor(value, signed=signed) for signed in (True, False)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error


def compresses(chosen: Compressor | Keep) -> bool:
    """Return whether a choice changes what is stored."""
    return not (isinstance(chosen, Keep) or chosen.is_identity)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a glob from `expand` matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def activation_rules(config: Activations, modules: Sequence[str]) -> Rules:
    """Build the rules for saved tensors."""
    _check_exceptions(config.exceptions, "activations", "module", modules)
    recompute_inputs(config)
    sites = {site: Site.parse(site) for site in config.sites}
    unknown = [name for name, site in sites.items() if site.module not in modules]
    raise_missing(unknown, "the model has no such modules")
    for pattern in config.recompute:
        if pattern != BLOCKS and not any(fnmatchcase(name, pattern) for name in modules):
            hint = nearest(pattern, modules)[:500]
            raise ValueError(f"activations.recompute={pattern!r} matches no module; {hint}")
    rules = Rules(config)
    rules.check(ACTIVATION)
    return rules


def recompute_inputs(config: Activations) -> Compressor | Keep:
    """Build the compressor for the inputs of recomputed modules, or the reason to keep them.

    Example:
        >>> recompute_inputs(Activations(recompute_inputs={"name": "group", "bits": 8})).bits
        8
    """
    if config.recompute_inputs == KEEP:
        return CHECKPOINT_INPUT
    built = build_compressor(config.recompute_inputs)
    if not isinstance(built, Keep) and not built.serves(CHECKPOINTED_INPUT):
        raise ValueError(
            f"activations.recompute_inputs={config.recompute_inputs!r}; allowed: keep, or a "
            "compressor of any numbers such as {name: group, bits: 8}"
        )
    return built


def state_rules(config: Optim, parameters: Sequence[str]) -> Rules:
    """Build the rules for optimizer states."""
    _check_exceptions(config.exceptions, "optim", "parameter", parameters)
    unknown = [site for site in config.sites if state_site(site)[0] not in parameters]
    raise_missing(unknown, "the model has no such parameters")
    rules = Rules(config)
    if any(isinstance(chosen, Auto) for chosen in rules.compressors()):
        raise ValueError("bits='auto' in a rule of optim; allowed: in those of activations")
    rules.check(STATE)
    return rules


def state_site(name: str) -> tuple[str, str]:
    """Return the parameter and the state in a site's name.

    Example:
        >>> state_site("wte.weight / adamw / exp_avg")
        ('wte.weight', 'exp_avg')
    """
    parts = name.split(" / ")
    return parts[0], parts[-1]


def raise_missing(sites: Sequence[str], why: str) -> None:
    """Raise ValueError for sites of a plan that do not exist, with the first ten names."""
    if sites:
        more = f" and {len(sites) - 10} more" if len(sites) > 10 else ""
        raise ValueError(
            f"{len(sites)} sites of the plan do not exist ({why}): {', '.join(sites[:10])}{more}"
        )


def _check_exceptions(rules: Sequence[Any], part: str, what: str, names: Sequence[str]) -> None:
    for index, rule in enumerate(rules):
        for pattern in str(getattr(rule, what)).split("|"):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"{part}.exceptions.{index}.{what}={pattern!r} matches no {what} of the model; "
                    f"{nearest(pattern, [name for name in names if name])[:500]}"
                )

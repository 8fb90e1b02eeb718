"""Plans: the decision for every site, made from rules before training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from torch import nn
from torch.optim import Optimizer

from memtrain.activations.adaptive.bit_widths import BitWidths
from memtrain.activations.intercept.compiler_internals import inside_compiled
from memtrain.activations.intercept.recompute import BLOCKS, NO_BLOCKS, recomputed
from memtrain.activations.saved.fit import Choose
from memtrain.activations.saved.options import NORMS, PRODUCTS, SMOOTH, Options
from memtrain.activations.saved.site import Record, Site
from memtrain.activations.trace.fake_forward import trace
from memtrain.compressors import Compressor, Keep
from memtrain.compressors.auto import Auto
from memtrain.config.sizes import format_size
from memtrain.config.sources import CPU, KEEP, Config, Optim, load
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.optim.states.known_optimizers import UNTESTED, is_tested
from memtrain.optim.states.layout import is_unsigned
from memtrain.optim.wrappers.weights import parse
from memtrain.plan import file
from memtrain.plan.predicted_bytes import (
    NO_COUNTER,
    UNKNOWN,
    PlanEntry,
    merge_records,
    predict_gradients,
    predict_states,
    predict_weights,
    training_dtypes,
)
from memtrain.plan.rules import (
    Rules,
    activation_rules,
    compresses,
    raise_missing,
    recompute_inputs,
    state_rules,
    state_site,
)
from memtrain.precision.forward_rounding import ForwardRounding
from memtrain.precision.graph import check, graph_of
from memtrain.precision.state import PrecisionState

_TITLES = {
    "activation": "saved activations",
    "state": "optimizer states",
    "gradient": "gradients",
    "weight": "weights",
}
"""Kind of an entry -> its title in a printed plan."""
_SHOWN = 8
"""Rows of each kind in a printed plan."""


@dataclass(frozen=True)
class Plan:
    """Map each site to a compressor, or to `Keep` with the reason.

    `make_plan` makes plans, and `print` shows the bytes before and after. Without a batch, the
    first training forward records the activation sites. Recorded sites do not change.

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
    _entries: dict[str, list[PlanEntry]] = field(default_factory=dict)
    _aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names of tied parameters
    _kept: dict[str, dict[str, int]] = field(default_factory=dict)  # reason -> site -> bytes
    bits: BitWidths | None = None
    """The widths of sites with `bits: auto`, if any."""
    precision: PrecisionState | None = None
    """The formats of rounded tensors, if any."""
    no_blocks: bool = False
    """Whether `@blocks` is to be recomputed, but the model repeats no module."""

    @property
    def options(self) -> Options:
        """Return the options of saved tensors for every compressor."""
        activations = self.config.activations
        derives = SMOOTH if self.bits is None else NORMS  # `bits: auto`: each payload has a width
        return Options(
            min_elements=activations.min_elements,
            derives=PRODUCTS if activations.derive_products else derives,
            recompute=tuple(activations.recompute),
            recompute_inputs=recompute_inputs(activations),
            low=None if self.config.weights == KEEP else parse(self.config.weights).dtype,
        )

    @property
    def compresses(self) -> bool:
        """Return whether the plan changes the saved tensors of forwards."""
        activations = self.config.activations
        recomputes = activations.recompute or activations.recompute_inputs != KEEP
        return bool(self.activation_rules or recomputes or self.config.precision.active)

    @property
    def intercepts(self) -> bool:
        """Return whether the plan changes ops of a forward or their saved tensors."""
        return self.compresses or self.config.weights != KEEP

    @property
    def choose_activation(self) -> Choose:
        """A function from a saved tensor's site to its compressor, or the reason to keep it."""
        return self.activation_rules.choose if self.bits is None else self._choose_automatic

    def _choose_automatic(self, site: Site) -> Compressor | Keep:
        chosen = self.activation_rules.choose(site)
        if isinstance(chosen, Auto) and self.bits is not None:
            return self.bits.resolve(site, chosen)
        return chosen

    def choose_state(self, parameter: str, state: str, *, tested: bool = True) -> Compressor | Keep:
        """Return the compressor for a parameter's state, or the reason to keep it.

        Args:
            parameter: Its name.
            state: Its name.
            tested: Whether memtrain knows the optimizer (`is_tested`): else only exceptions hold.
        """
        alternatives = [(name, state) for name in self._aliases.get(parameter, (parameter,))]
        rules = self.state_rules
        chosen = rules.choose_tied(alternatives, signed=not is_unsigned(state))
        if tested or not compresses(chosen) or any(map(rules.is_exception, alternatives)):
            return chosen
        return UNTESTED

    def _state_of(self, entry: PlanEntry, parameter: str, state: str) -> Compressor | Keep:
        untested = entry.reason == UNTESTED.reason
        return UNTESTED if untested else self.choose_state(parameter, state)

    def record(self, records: Iterable[Record]) -> None:
        """Add the activation sites of a forward.

        Recorded sites stay, unless their automatic bits have changed.
        """
        records = list(records)
        new = {entry.site: entry for entry in merge_records(records)}
        stale = self.bits.stale if self.bits is not None else set()
        rows = self._entries.setdefault("activation", [])
        rows[:] = [new.get(row.site, row) if row.site in stale else row for row in rows]
        stale -= new.keys()
        known = {row.site for row in rows}
        for record in records:
            if not record.compressor and (site := record.site.name) not in known:
                sites = self._kept.setdefault(record.reason, {})
                sites[site] = sites.get(site, 0) + record.planned
        rows += [entry for site, entry in new.items() if site not in known]

    def kept(self, reason: str) -> dict[str, int]:
        """Map sites of saved tensors to their bytes, for kept tensors with a prefix of a reason."""
        found: dict[str, int] = {}
        for known, sites in self._kept.items():
            if known.startswith(reason):
                for site, nbytes in sites.items():
                    found[site] = found.get(site, 0) + nbytes
        return found

    def trace(
        self, model: nn.Module, batch: Any, choices: dict[Site, Compressor | Keep] | None = None
    ) -> list[Record]:
        """Trace the saved tensors of a forward on fake tensors; add decisions to `choices`."""
        rounding = None
        if self.precision is not None:
            if self.precision.graph is None:
                self.assign_precision(model, batch)
            rounding = ForwardRounding(self.precision, is_trace=True)
        found = {} if choices is None else choices

        def choose(site: Site) -> Compressor | Keep:
            found[site] = self.choose_activation(site)
            return found[site]

        dtypes = training_dtypes(inside_compiled(model) or model, self.config)
        return trace(model, batch, choose, self.options, dtypes, rounding)

    def assign_precision(self, model: nn.Module, batch: Any) -> None:
        """Choose formats for the tensors of training by a forward on fake tensors.

        Raises:
            ValueError: If the model has no GEMM.
        """
        if self.precision is not None:
            self.precision.assign(graph_of(model, batch, self.choose_activation, self.options))

    def automatic_bits(self) -> BitWidths | None:
        """Return the initial widths for rules with `bits: auto`; None without such rules.

        Raises:
            ValueError: If such a rule has no `average_bits`.
        """
        if not any(isinstance(chosen, Auto) for chosen in self.activation_rules.compressors()):
            return None
        if self.config.activations.average_bits is None:
            raise ValueError("bits='auto' needs activations.average_bits; allowed: 1 to 8")
        return BitWidths(self.config.activations.average_bits)

    def idle_exceptions(self, saved: Iterable[Site] = ()) -> list[str]:
        """List the user's rules that win at no recorded site and no site in `saved`."""
        # Small tensors are kept without the rules.
        recorded = (Site.parse(entry.site) for entry in self.entries("activation"))
        for site in (*recorded, *saved):
            self.activation_rules.choose(site)
        for entry in self.entries("state"):
            self.choose_state(*state_site(entry.site))
        parts = {"activations": self.activation_rules}
        if self.entries("state"):
            parts["optim"] = self.state_rules
        return [
            f"{part}.exceptions.{text}"
            for part, rules in parts.items()
            for text in rules.idle_exceptions()
        ]

    def entries(self, kind: str = "") -> list[PlanEntry]:
        """Return the plan's entries of one kind or all; those of activations once recorded."""
        kinds = [kind] if kind else ["weight", "gradient", "state", "activation"]
        return [entry for name in kinds for entry in self._entries.get(name, [])]

    def to_yaml(self) -> str:
        """Return the plan as YAML, which `wrap`, `make_plan` and `audit` accept.

        Returns:
            A complete config with one line per known site. See `memtrain.plan.file`.

        Raises:
            ValueError: For a compressor that is not in memtrain's registry.
        """
        states = [(entry, entry.site.split(" / ")) for entry in self.entries("state")]
        saved = [(entry, Site.parse(entry.site)) for entry in self.entries("activation")]
        return file.dumps(
            self.config,
            {
                "activations": [
                    (entry.site, self.activation_rules.choose(site), entry.comment)
                    for entry, site in saved
                    if "*" not in site
                ],
                "optim": [
                    (entry.site, self._state_of(entry, *site[::2]), entry.comment)
                    for entry, site in states
                    if len(site) == 3 and entry.reason != NO_COUNTER
                ],
            },
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to a YAML file atomically.

        Args:
            path: A path that ends in `.yaml`; an existing file is replaced.

        Raises:
            ValueError: For another suffix, which `wrap` does not accept.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"plan file {str(path)!r}; allowed: names that end in .yaml")
        file.write_file(path, self.to_yaml())

    def listing(self) -> str:
        """Return YAML with each site's compressor or reason to keep, and idle exceptions."""
        tree: dict[str, dict[str, str]] = {}
        for entry in self.entries():
            what = entry.compressor or f"keep: {entry.reason}"
            tree.setdefault(entry.kind, {})[entry.site] = what
        idle = [*self.idle_exceptions(), *([NO_BLOCKS] if self.no_blocks else [])]
        lists = {"matched nothing": idle} if idle else {}
        return OmegaConf.to_yaml(OmegaConf.create({**tree, **lists}))

    def __str__(self) -> str:
        """Return a table of the bytes with and without the plan, largest groups first."""
        lines = [f"{'':54}{'baseline':>12}{'planned':>12}"]
        for kind, title in _TITLES.items():
            rows = self.entries(kind)
            groups: dict[str, list[PlanEntry]] = {}
            for row in rows:
                where = " / ".join(row.site.split(" / ")[1:]) or kind
                what = row.compressor.partition("(")[0] or f"kept: {row.reason}"
                groups.setdefault(f"  {where}: {what}"[:53], []).append(row)
            largest = sorted(groups.items(), key=lambda one: -sum(row.nbytes for row in one[1]))
            for name, part in ((title, rows), *largest[: _SHOWN if len(groups) > 1 else 0]):
                plain, planned = sum(r.nbytes for r in part), sum(r.planned for r in part)
                lines.append(f"{name:54}{format_size(plain):>12}{format_size(planned):>12}")
        return "\n".join(lines)


def make_plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    cfg: Any = None,
    *,
    batch: Any = None,
) -> Plan:
    """Decide what is done at every site. The model and the optimizer are not changed.

    Args:
        model: The model; it may be compiled by `torch.compile`.
        optimizer: Its optimizer, or a list of them.
        cfg: Any input of `memtrain.config.load`, or a plan.
        batch: The model's input. A forward on fake tensors then records the activation sites.
            Without a batch the first training forward of a wrapped model records them.

    Returns:
        The plan.

    Raises:
        ValueError: For an invalid config, an unknown compressor, or an exception (a user's rule)
            whose module or parameter does not exist.
        TypeError: For values of the wrong type.
    """
    outer_model = model
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    optimizers = [inner_optimizer(one) for one in optimizers]
    model = inside_compiled(outer_model) or outer_model
    config = load(yaml.safe_load(cfg.to_yaml()) if isinstance(cfg, Plan) else cfg)
    modules = [name for name, _ in model.named_modules()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    plan = Plan(
        config,
        activation_rules(config.activations, modules),
        state_rules(config.optim, list(parameters)),
        _aliases=_aliases(parameters),
    )
    precision = PrecisionState(config.precision) if config.precision.active else None
    if precision is not None:
        check(model)
    no_blocks = BLOCKS in config.activations.recompute and not recomputed(model, [BLOCKS])
    bits = plan.automatic_bits()
    plan = replace(plan, bits=bits, precision=precision, no_blocks=no_blocks)
    plan._entries["weight"] = predict_weights(model, optimizers, config)
    plan._entries["gradient"] = predict_gradients(model, optimizers, config)
    min_elements = config.optim.min_elements
    masters = training_dtypes(model, config)
    states = plan._entries["state"] = []
    for one in optimizers:
        by_rules = partial(plan.choose_state, tested=is_tested(one)) if plan.state_rules else None
        states += predict_states(model, one, by_rules, min_elements=min_elements, masters=masters)
    if config.optim.device == CPU:
        plan._entries["state"] = [replace(one, planned=0, host=one.planned) for one in states]
    _check_states(plan)
    if batch is not None:
        choices: dict[Site, Compressor | Keep] = {}
        plan.record(plan.trace(outer_model, batch, choices))
        known = {site.name for site in choices}
        known.update(entry.site for entry in plan.entries("activation"))
        unknown = [name for name in config.activations.sites if name not in known]
        raise_missing(unknown, "no op of the forward saves them")
    return plan


def activation_plan(model: nn.Module, cfg: Any = None) -> Plan:
    """Return a plan for saved tensors alone, without an optimizer and without recorded sites."""
    config = load(cfg)
    rules = activation_rules(config.activations, [name for name, _ in model.named_modules()])
    plan = Plan(config, rules, Rules(Optim()))
    return replace(plan, bits=plan.automatic_bits())


def _check_states(plan: Plan) -> None:
    """Raise for states of a plan file that the optimizer does not have."""
    entries = plan.entries("state")
    if any(entry.reason.startswith(UNKNOWN) for entry in entries):
        return
    params = {state_site(entry.site) for entry in entries}
    known = {(tied, state) for name, state in params for tied in plan._aliases.get(name, (name,))}
    unknown = [site for site in plan.config.optim.sites if state_site(site) not in known]
    raise_missing(unknown, "the optimizer has no such states")


def _aliases(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in parameters.items():
        names[parameter] = (*names.get(parameter, ()), name)
    return {name: tied for tied in names.values() for name in tied if len(tied) > 1}

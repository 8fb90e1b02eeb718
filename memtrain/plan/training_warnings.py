"""Warnings at a step: unmet requests of a plan, and parameters without an optimizer."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from memtrain.activations.intercept.compiler_internals import compiled_frames, is_compiled
from memtrain.activations.intercept.graph_saves import HOST, NO_FAKE
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.inlined_hooks import EQUAL, UNSUPPORTED
from memtrain.activations.saved.site import (
    CUSTOM_FUNCTION,
    IN_TRANSFORM,
    NO_RULE,
    OTHER_HOOKS,
    OTHER_THREAD,
    SHARDED,
    UNKNOWN_OP,
    Site,
)
from memtrain.compressors import Keep
from memtrain.config.sizes import format_size
from memtrain.optim.states.known_optimizers import UNTESTED, is_tested
from memtrain.optim.states.shards import in_zero, is_sharded
from memtrain.optim.wrappers.host_states import HostStates
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.wrapper import WeakRef
from memtrain.plan.plan import Plan
from memtrain.plan.predicted_bytes import UNKNOWN, parameters_in_groups
from memtrain.plan.rules import compresses

MIN_UNKNOWN_BYTES = 2**16
"""Bytes of unknown ops below which no warning is given."""
MIN_KEPT_SHARE = 0.1
"""Share of saved bytes, kept by custom Functions, below which no warning is given."""

_COMPILED = (
    "it ran inside torch.compile, with a backend that is not of AOTAutograd, or by a graph of an "
    "equal module that is not wrapped"
)
_IN_GRAPH = "its graph of torch.compile keeps what the compiler chooses: it is not run again"
_FIXES = {
    UNSUPPORTED: "train on torch 2.11 to 2.13, or without torch.compile",
    NO_FAKE: "give it one (torch.library.register_fake), or train without torch.compile",
    HOST.reason: "train without torch.compile, or name the compressor inside of host",
    _COMPILED: (
        "train with another backend, call torch.compiler.reset() before the model's next forward, "
        "or set preset=optimizer_only"
    ),
    EQUAL: "call torch.compiler.reset() before the model's next forward",
    _IN_GRAPH: (
        "set torch._functorch.config.activation_memory_budget, call torch.utils.checkpoint in the "
        "model itself, or set activations.recompute=[]"
    ),
    OTHER_HOOKS: "turn them off (activation offloading, save_on_cpu), or set activations=none",
    IN_TRANSFORM: "call the model outside of it, or set activations=none",
    OTHER_THREAD: "run one forward at a time",
    CUSTOM_FUNCTION: "switch that kernel off where the model has a plain form of it",
    UNKNOWN_OP: "its gradient is exact; use ops of the known-op table where the model can",
    SHARDED: "shard by FSDP2 or DDP in place of tensor parallelism, or set activations=none",
}


def _line(reason: str, sites: Sequence[str], nbytes: int = 0) -> str:
    """Say which sites were kept, their bytes as far as known, the reason and the fix."""
    of = f"{sites[0]}{f' and {len(sites) - 1} more' * (len(sites) > 1)}"
    size = f" {format_size(nbytes)}" if nbytes else ""
    return f"{of}: kept{size}, {reason}; {_FIXES[reason]}"


def uncompressed_sites(plan: Plan) -> list[str]:
    """List the rules for saved tensors that recorded forwards did not satisfy.

    Sites that are kept by design (small tensors, statistics, the model's input, `keep` rules) are
    left out.
    """
    total = sum(entry.nbytes for entry in plan.entries("activation"))
    found = []
    for reason in _FIXES:
        sites = plan.kept(reason)
        rules = plan.activation_rules
        names = [
            site
            for site in sites
            if site.endswith("*") or compresses(rules.choose(Site.parse(site)))
        ]
        nbytes = sum(sites[site] for site in names)
        minimum = MIN_KEPT_SHARE * total if reason in (CUSTOM_FUNCTION, UNKNOWN_OP) else 0
        minimum = max(minimum, MIN_UNKNOWN_BYTES) if reason == UNKNOWN_OP else minimum
        if names and nbytes >= minimum:
            found.append(_line(reason, names, nbytes))
    return found


class FirstStepReport:
    """A hook before an optimizer's first step that warns of unmet requests.

    With `strict` in the plan, the hook raises instead.
    """

    def __init__(self, plan: Plan, interception: Interception, model: nn.Module) -> None:
        self._plan, self._interception = plan, interception
        self._is_compiled = any(map(is_compiled, model.modules()))
        self._frames, self._done = compiled_frames(), False

    def attach(self, optimizer: Optimizer) -> Any:
        """Register the hook on the optimizer from `wrap`; return its handle."""
        if isinstance(optimizer, ReleaseGradients | HostStates):  # they update before `step`
            optimizer.before = self.report
        return optimizer.register_step_pre_hook(self)

    def attach_model(self, model: nn.Module) -> list[Any]:
        """Register hooks on a model without an optimizer, which report at the end of a forward."""
        if type(model).forward is nn.Module.forward:  # a container, whose children are called
            return [handle for part in model.children() for handle in self.attach_model(part)]
        return [model.register_forward_hook(self._after_forward)]

    def _after_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.report()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Report before the first step with a learning rate above 0."""
        if self._done:
            return
        groups = optimizer.param_groups
        has_gradient = any(p.grad is not None for group in groups for p in group["params"])
        if has_gradient and any(float(group.get("lr", 1.0)) for group in groups):
            self.report()

    def report(self) -> bool:
        """Warn once of unmet requests; return whether nothing is left to report.

        Raises:
            RuntimeError: With `strict`.
        """
        chosen = [c for c in self._plan.activation_rules.compressors() if not isinstance(c, Keep)]
        self._done = self._done or all(compressor.is_identity for compressor in chosen)
        seen = self._interception.seen
        compiled = not seen and (self._is_compiled or compiled_frames() != self._frames)
        if self._done or not (seen or compiled):
            return self._done
        why = self._interception.graphs.why or _COMPILED
        hidden = compiled or (why != _COMPILED and compiled_frames() != self._frames)
        found = [_line(why, ["the compiled forward"])] if hidden else []
        recompute = self._interception.recompute
        if compiled_frames() != self._frames and (missed := {*recompute.names} - recompute.called):
            found.append(_line(_IN_GRAPH, sorted(missed)))
        found += uncompressed_sites(self._plan)
        self._done = not (found and self._plan.config.strict)
        unseen = found or self._interception.compiled or recompute.names
        idle = [] if unseen else self._plan.idle_exceptions()
        if idle := [text for text in idle if text.startswith("activations")]:
            warnings.warn(
                "exceptions that match no saved tensor of the first forward: "
                f"{'; '.join(idle)}; memtrain.plan_of(model).listing() lists all",
                RuntimeWarning,
                stacklevel=4,
            )
        if not found:
            return True
        lines = "\n".join(f"- {one}" for one in found)
        text = f"the plan compresses saved activations, but not all were:\n{lines}\n"
        if self._plan.config.strict:
            raise RuntimeError(f"{text}Nothing was changed: strict=true makes this an error.")
        end = "memtrain.plan_of(model) lists each site; strict=true makes this an error."
        warnings.warn(text + end, RuntimeWarning, stacklevel=4)
        return True


def warn_of_kept_states(plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Warn at `wrap` of optimizers whose states the plan's rules do not compress."""
    if not any(map(compresses, plan.state_rules.compressors())):
        return
    classes: dict[str, list[Optimizer]] = {}
    for optimizer in optimizers:
        classes.setdefault(type(optimizer).__name__, []).append(optimizer)
    for kind, group in classes.items():
        entries = [row for row in plan.entries("state") if row.site.split(" / ")[1] == kind.lower()]
        kept = [row for row in entries if row.reason in (UNTESTED.reason, NO_RULE.reason)]
        unknown = any(row.reason.startswith(UNKNOWN) for row in entries)
        unknown &= not (plan.config.optim.exceptions or all(map(is_tested, group)))
        nbytes = sum(row.planned + row.host for row in kept)
        if unknown or any(row.reason == UNTESTED.reason for row in kept):
            count = sum(p.numel() for p in parameters_in_groups(group))
            size = f"{nbytes / count:.3g} bytes per parameter of " if kept else ""
            text = (
                f"{size}states of {kind} stay exact: memtrain knows only the optimizers in "
                "docs/guides/optimizers.md, and in others an error of a few bits may spoil a step; "
                "allowed: optim.exceptions for states that you have tested, or optim=none"
            )
        elif kept and not any(row.compressor for row in entries):
            names = sorted({row.site.rpartition(" / ")[2] for row in kept})
            text = (
                f"no state of {kind} is compressed: no rule matches {', '.join(names)} "
                f"({format_size(nbytes)}); allowed: optim.rules that name them "
                "(docs/guides/optimizers.md), or optim=none"
            )
        else:
            continue
        warnings.warn(text, RuntimeWarning, stacklevel=7)


class UntrainedParameters:
    """A hook before steps that reports parameters without an optimizer.

    The hook warns once of parameters that are in no group, such as those of an adapter that was
    added after `wrap`. It raises if no parameter in any group belongs to the model any more:
    `load_state_dict(assign=True)` replaces parameters, and nothing would be trained. Parameters in
    no group at `wrap` are the user's choice.

    Without an interception, which records replaced parameters, only the first parameter is
    compared. The model and the optimizers are referenced weakly.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        interception: Interception | None,
    ) -> None:
        self._model, self._interception = WeakRef(model), interception
        self._optimizers = [WeakRef(optimizer) for optimizer in optimizers]
        untrained = _untrained(model, parameters_in_groups(optimizers))
        self._names = {name for name, _ in untrained}  # sharding replaces the parameters
        self._params = WeakIdKeyDictionary({param: name for name, param in untrained})  # renamed
        self._checked: list[int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_params": {}}  # a copy has no model either

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Check the parameters before a step, unless they are those of the last check."""
        model, interception = self._model(), self._interception
        if model is None:
            return
        first = id(next(model.parameters(), None))  # known before a closure's forward
        now = [first] if interception is None else [first, *interception.trained]
        if now == self._checked:
            return
        others = (reference() for reference in self._optimizers)
        trained = parameters_in_groups([optimizer, *(one for one in others if one is not None)])
        found = _untrained(model, trained)
        found = [(n, p) for n, p in found if n not in self._names and p not in self._params]
        names = [name for name, _ in found]
        elsewhere = trained.isdisjoint(model.parameters())
        if in_zero(param for _, param in found) or (elsewhere and any(map(is_sharded, trained))):
            names = []  # the stepped parameters contain the model's
        if names and trained and elsewhere:
            raise RuntimeError(
                f"{_first_names(names)}: in no group of the optimizer, and none of its parameters "
                "belongs to the model, as after load_state_dict(assign=True): a step would change "
                "nothing; allowed: load_state_dict without assign, or memtrain.wrap after it, with "
                "an optimizer of the new parameters"
            )
        self._checked = now
        if not names:
            return
        self._names.update(names)
        warnings.warn(
            f"{_first_names(names)}: in no group of the optimizer, so that no step changes them "
            "(added after memtrain.wrap, or removed from their group); allowed: "
            "optimizer.add_param_group with them, or requires_grad_(False)",
            RuntimeWarning,
            stacklevel=3,
        )


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _untrained(model: nn.Module, trained: set[Tensor]) -> list[tuple[str, Tensor]]:
    named = model.named_parameters()
    return [(name, p) for name, p in named if p.requires_grad and p not in trained]

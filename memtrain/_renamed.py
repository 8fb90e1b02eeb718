"""Import paths of the release before, which warn and lead to where things are now."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED = {
    "memtrain.compressors.fewbit_register": "memtrain.compressors.fewbit.register",
    "memtrain.compressors.fewbit_tables": "memtrain.compressors.fewbit.tables",
    "memtrain.experiments": "memtrain.training",
    "memtrain.experiments.config": "memtrain.training.settings",
    "memtrain.meter": "memtrain.audit.live_storages",
    "memtrain.peak": "memtrain.audit.peak",
    "memtrain.planfile": "memtrain.plan.file",
    "memtrain.quality": "memtrain.gradient_quality",
    "memtrain.report": "memtrain.audit.report",
    "memtrain.rules": "memtrain.plan.rules",
    "memtrain.schema": "memtrain.config.schema",
    "memtrain.sizes": "memtrain.config.sizes",
}
"""Documented path of a module in 0.1 -> its path now."""


class _Renamed:
    """Finds modules by their old paths.

    It is asked first: Python would look for modules of a renamed package in the new one's folder,
    and run them again under their old names.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if _new_path(name) else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _new_path(spec.name)
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # the import system is about to overwrite it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; it has run under its new name."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def _new_path(name: str) -> str:
    """The path now of a renamed module, or of a module in a renamed package; else empty."""
    package, _, module = name.rpartition(".")
    below = RENAMED.get(package)
    return RENAMED.get(name) or (f"{below}.{module}" if below else "")


def install() -> None:
    """Let old paths be imported."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Renamed())  # pyright: ignore[reportArgumentType]

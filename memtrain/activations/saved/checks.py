"""Compares what a backward reads, and what a replaced op returns, with the exact values."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from memtrain.activations.saved.handles import Kept
from memtrain.activations.saved.payload import roundtrip
from memtrain.activations.saved.site import Site
from memtrain.compressors import Compressor, Key
from memtrain.kernels.random.generators import random_state, set_random_state


class Checks:
    """Keeps a copy of each saved tensor beside what takes its place, and compares the two.

    The error of a decompressed tensor may be twice that of compressing the copy once more, in the
    norm and in the largest element; without a compressor, not at all. A replaced op
    may differ from its value in float64 by twice the error of torch's own op and one rounding.

    Each difference is reported in a sentence, in the first `forwards` forwards (None: all).

    Memory:
        All saved tensors that are compressed, a second time.
    """

    def __init__(self, report: Callable[[str], None], *, forwards: int | None = None) -> None:
        self.report = report
        self.forwards = forwards
        """Forwards that are still to be compared; None: all."""
        self.tensors = 0
        """Saved tensors that were compared."""
        self.ops = 0
        """Replaced ops that were compared."""

    def begin(self) -> bool:
        """Begin a forward; return whether it is compared."""
        if self.forwards is not None:
            self.forwards -= 1
        return self.forwards is None or self.forwards >= 0

    def around(self, handle: Any, x: Tensor, site: Site, compressor: Compressor | None) -> Any:
        """Return a handle that compares when it is read."""
        unpack = partial(self._unpack, handle, x.detach().clone(), site, compressor)
        return SimpleNamespace(unpack=unpack)

    def _unpack(self, handle: Any, x: Tensor, site: Site, compressor: Compressor | None) -> Tensor:
        found = handle.unpack()
        if isinstance(handle, Kept) and handle.kept is None and found.shape == x.shape:
            self.tensors += 1  # it has no values
            return found
        with torch.no_grad():
            self.compare(found, x, site, compressor)
        return found

    def replaced(
        self,
        site: Site,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Run a replaced op; compare its result, and the arguments that it writes, with torch's."""
        inputs = (tuple(args), dict(kwargs))
        same, double = _copy(inputs, None), _copy(inputs, torch.float64)
        before = random_state()
        result = run()
        after = random_state()
        ours = [*_tensors((result, inputs))]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            set_random_state(before)
            torchs = [*_tensors((function(*same[0], **same[1]), same))]
            set_random_state(before)
            with torch.autocast(ours[0].device.type, enabled=False):
                exact = [*_tensors((function(*double[0], **double[1]), double))]
            set_random_state(after)
            for three in zip(ours, torchs, exact, strict=True):
                self._compare_values(site, *three)
        self.ops += 1
        return result

    def _compare_values(self, site: Site, ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
        if ours.shape != torchs.shape or ours.dtype != torchs.dtype:
            self.report(
                f"{site.name}: the replaced op returned {ours.dtype} of shape "
                f"{tuple(ours.shape)}, torch's {torchs.dtype} of shape {tuple(torchs.shape)}"
            )
            return
        if not ours.is_floating_point():
            if not torch.equal(ours, torchs):
                self.report(f"{site.name}: the replaced op returned other {ours.dtype} values")
            return
        if site.op == "dropout":  # the two may draw other masks
            drawn = (ours != 0) & (torchs != 0)
            ours, torchs, exact = ours[drawn], torchs[drawn], exact[drawn]
        finite = torchs.isfinite()
        if not torch.equal(ours.isfinite(), finite):
            self.report(f"{site.name}: the replaced op is finite where torch's is not, or inverse")
            return
        a, b, c = (t[finite].double() for t in (ours, torchs, exact))
        error, torch_error = _largest(a - c), _largest(b - c)
        allowed = 2 * torch_error + torch.finfo(ours.dtype).eps * _largest(c)
        if not error <= allowed:
            self.report(
                f"{site.name}: the replaced op errs by {error:.3g}, torch's by {torch_error:.3g}; "
                f"allowed: {allowed:.3g}"
            )

    def attention(self, fused: Any, saved: Mapping[str, Tensor], module: str, op: str) -> None:
        """Compare the results that a fused attention recomputes from its exact inputs."""
        for name, found in fused.results().items():
            self.compare(found, saved[name], Site(module, op, name), None)

    def compare(self, found: Tensor, x: Tensor, site: Site, compressor: Compressor | None) -> None:
        """Report a decompressed tensor that is farther from the saved one than it may be."""
        self.tensors += 1
        if found.shape != x.shape or found.dtype != x.dtype:
            self.report(
                f"{site.name}: a saved tensor of shape {tuple(x.shape)} in {x.dtype} came back as "
                f"{tuple(found.shape)} in {found.dtype}"
            )
            return
        if compressor is None:
            if not torch.equal(found.nan_to_num(), x.nan_to_num()):
                self.report(f"{site.name}: a saved tensor that is kept came back with other values")
            return
        finite = x.isfinite()
        exact = x[finite].double()
        error = found[finite].double() - exact
        fresh = roundtrip(x, compressor, Key(seed=1))[finite].double() - exact
        norm = float(exact.norm()) or 1.0
        far = float(error.norm()) > 2 * float(fresh.norm()) or _largest(error) > 2 * _largest(fresh)
        if far or not bool(error.isfinite().all()):
            self.report(
                f"{site.name}: a saved tensor came back with an error of "
                f"{float(error.norm()) / norm:.3g} of its norm; {compressor!r} makes "
                f"{float(fresh.norm()) / norm:.3g}"
            )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.detach()


def _copy(tree: Any, dtype: torch.dtype | None) -> Any:
    """Copy the tensors of a tree, and those of modules in it, in another dtype if one is given."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            new = leaf.detach().clone()
            return new if dtype is None or not new.is_floating_point() else new.to(dtype)
        if isinstance(leaf, nn.Module):  # one that writes an op out; its hooks stay behind
            new = copy.copy(leaf)
            for tensors in ("_parameters", "_buffers"):
                vars(new)[tensors] = {k: one(v) for k, v in vars(leaf)[tensors].items()}
            return new
        return leaf

    return tree_map(one, tree)

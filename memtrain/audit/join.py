"""Two traces of one forward, plain and planned, as rows whose two sides mean the same memory."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memtrain.activations.saved.site import Record, Site
from memtrain.activations.trace.site_sets import Groups


class Joined(NamedTuple):
    """Sites that stand for the same memory, without and with the plan."""

    sites: tuple[Site, ...]
    plain: int  # bytes
    planned: int  # bytes
    compressor: str  # of the largest payload; "" where all is kept
    reason: str  # why it is kept, where it is

    @property
    def name(self) -> str:
        """Of the first site, and how many more there are.

        Example:
            >>> sites = Site("a", "relu", "input"), Site("b", "linear", "input")
            >>> Joined(sites, 8, 2, "", "").name
            'a / relu / input (+1)'
        """
        more = f" (+{len(self.sites) - 1})" if len(self.sites) > 1 else ""
        first = next(iter(self.sites))
        return f"{first.name}{more}"


def join(plain: Sequence[Record], planned: Sequence[Record]) -> list[Joined]:
    """Bring two traces of one forward together; every byte of both is in exactly one row.

    A site that both traces know is a row. Where a plan replaces ops, sites differ: the sites of
    an op whose saved tensors differ, and the ops of a module that one trace lacks, become one
    row. So do sites of one storage where plain PyTorch counts it at one and the plan at another:
    ReLU's output, say, is the next convolution's input, and only the latter once ReLU keeps bits.

    Args:
        plain: The trace in which nothing is replaced.
        planned: The trace under the plan.

    Returns:
        Rows with bytes on either side, in the order of the forward.

    Memory:
        That of the rows.

    Example:
        >>> before = [Record(Site("a", "gelu", "input"), (8,), "float32", 32, 32, "", "")]
        >>> after = [Record(Site("a", "gelu", "input"), (8,), "float32", 32, 3, "code", "")]
        >>> [(row.name, row.plain, row.planned) for row in join(before, after)]
        [('a / gelu / input', 32, 3)]
    """
    left = _sums((record.site, record.nbytes) for record in plain)
    right = _sums((record.site, record.planned) for record in planned)
    groups = Groups([*left, *right])
    _join_ops(groups, left, right)
    _join_storages(groups, plain, left, right)
    chosen: dict[Site, list[Record]] = {}
    for record in planned:
        chosen.setdefault(groups.find(record.site), []).append(record)
    rows = [_row(sites, left, right, chosen.get(top, [])) for top, sites in groups.sets().items()]
    return [row for row in rows if row.plain or row.planned]


def _sums(pairs: Iterable[tuple[Site, int]]) -> dict[Site, int]:
    sums: dict[Site, int] = {}
    for site, nbytes in pairs:
        sums[site] = sums.get(site, 0) + nbytes
    return sums


def _join_ops(groups: Groups, left: dict[Site, int], right: dict[Site, int]) -> None:
    """Unite the sites of an op that differ, and the ops of a module that one side lacks."""
    modules: dict[str, dict[str, list[set[Site]]]] = {}
    for side, sums in enumerate((left, right)):
        for site in sums:
            ops = modules.setdefault(site.module, {})
            ops.setdefault(site.op, [set(), set()])[side].add(site)
    for ops in modules.values():
        for before, after in ops.values():
            if before != after:
                groups.unite(before | after)
        lone = [before | after for before, after in ops.values() if not (before and after)]
        if any(after and not before for before, after in ops.values()):
            groups.unite(set().union(*lone))


def _join_storages(
    groups: Groups, plain: Sequence[Record], left: dict[Site, int], right: dict[Site, int]
) -> None:
    """Unite a group that only the plan counts with the one that plain PyTorch counts it at."""
    counted = {record.storage: record.site for record in plain if record.nbytes}
    sums = {
        top: (sum(left.get(site, 0) for site in sites), sum(right.get(site, 0) for site in sites))
        for top, sites in groups.sets().items()
    }
    for record in plain:
        before, after = sums.get(groups.find(record.site), (1, 1))
        if after and not before and record.storage in counted:
            groups.unite((record.site, counted[record.storage]))


def _row(
    sites: list[Site], left: dict[Site, int], right: dict[Site, int], records: list[Record]
) -> Joined:
    # The name to show is that of most bytes, so that a replaced op is named as the plan knows it.
    shown = max(sites, key=lambda site: (right.get(site, 0), left.get(site, 0)))
    largest = sorted(records, key=lambda record: -record.planned)
    compressor = next((record.compressor for record in largest if record.compressor), "")
    reason = next((record.reason for record in largest if not record.compressor), "")
    return Joined(
        (shown, *(site for site in sites if site != shown)),
        sum(left.get(site, 0) for site in sites),
        sum(right.get(site, 0) for site in sites),
        compressor,
        reason,
    )

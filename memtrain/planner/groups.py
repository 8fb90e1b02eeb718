"""Sites that share memory or lean on one another: what is done to one, the others feel."""

from collections.abc import Iterable, Sequence

from memtrain.activations.join import join
from memtrain.activations.sites import Record, Site
from memtrain.config import KEEP
from memtrain.planner.traces import Traces

DERIVED = "derived"
_SINCE = "computed again from what "


class Groups:
    """Disjoint sets of sites, each known by its earliest (union-find).

    Example:
        >>> sites = [Site("", op, "input") for op in ("relu", "linear", "gelu")]
        >>> groups = Groups()
        >>> for site in sites:
        ...     groups.add(site)
        >>> groups.unite(sites[:2])
        >>> [len(own) for own in groups.sets().values()]
        [2, 1]
    """

    def __init__(self) -> None:
        self._above: dict[Site, Site] = {}
        self._rank: dict[Site, int] = {}

    def add(self, site: Site) -> None:
        """Make a set of one site, unless it is known."""
        self._rank.setdefault(site, len(self._rank))
        self._above.setdefault(site, site)

    def find(self, site: Site) -> Site:
        """The earliest site of its set."""
        while self._above[site] != site:
            self._above[site] = self._above[self._above[site]]
            site = self._above[site]
        return site

    def unite(self, sites: Iterable[Site]) -> None:
        """Make one of the sets of these sites."""
        tops = sorted({self.find(site) for site in sites}, key=self._rank.__getitem__)
        for top in tops[1:]:
            self._above[top] = tops[0]

    def sets(self) -> dict[Site, set[Site]]:
        """Earliest site -> all of its set, in the order of these."""
        found: dict[Site, set[Site]] = {}
        for site in self._rank:
            found.setdefault(self.find(site), set()).add(site)
        return found


def united(traces: Traces) -> Groups:
    """The sites of all traces, those together of which any trace counts the bytes together.

    Args:
        traces: Of a model.

    Returns:
        Sets such that bytes of different sets add up, whatever is chosen for each.
    """
    plain, groups = traces.at[KEEP].records, Groups()
    for trace in traces:
        for record in trace.records:
            groups.add(record.site)
    for trace in traces:
        for row in join(plain, trace.records):
            groups.unite(row.sites)
        _unite_shared(groups, trace.records)
    return groups


def source_of(record: Record) -> str:
    """The op whose output a derived record stands for."""
    return record.reason.removeprefix(_SINCE).removesuffix(" keeps")


def _unite_shared(groups: Groups, records: Sequence[Record]) -> None:
    """Unite sites of one storage, and those that are derived with what they lean on."""
    by_storage: dict[int, Site] = {}
    latest: dict[str, Site] = {}
    for record in records:
        if not record.shape:  # a note, not a tensor
            continue
        groups.unite((by_storage.setdefault(record.storage, record.site), record.site))
        if record.compressor == DERIVED:
            op = source_of(record)
            if op in latest:
                groups.unite((latest[op], record.site))
        else:
            latest[record.site.op] = record.site

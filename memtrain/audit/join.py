"""Join two traces of one forward, baseline and planned, by sites that mean the same memory."""

from collections.abc import Iterable, Sequence

from memtrain.activations.saved.site import Record, Site


class DisjointSets:
    """Disjoint sets of sites, each represented by its earliest (union-find)."""

    def __init__(self, sites: Iterable[Site] = ()) -> None:
        self._parent: dict[Site, Site] = {}
        self._rank: dict[Site, int] = {}
        for site in sites:
            self.add(site)

    def add(self, site: Site) -> None:
        """Make a set of one site, unless it is known."""
        self._rank.setdefault(site, len(self._rank))
        self._parent.setdefault(site, site)

    def find(self, site: Site) -> Site:
        """Return the earliest site of its set."""
        while self._parent[site] != site:
            self._parent[site] = self._parent[self._parent[site]]
            site = self._parent[site]
        return site

    def union(self, sites: Iterable[Site]) -> None:
        """Make one of the sets of these sites."""
        roots = sorted({self.find(site) for site in sites}, key=self._rank.__getitem__)
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def sets(self) -> dict[Site, list[Site]]:
        """Earliest site -> all of its set, both in the order in which they were added."""
        found: dict[Site, list[Site]] = {}
        for site in self._rank:
            found.setdefault(self.find(site), []).append(site)
        return found


def join(plain: Sequence[Record], planned: Sequence[Record]) -> list[dict[Site, tuple[int, int]]]:
    """Join two traces of one forward; every byte of both is in exactly one set of sites.

    A site in both traces is a set. If a plan replaces ops, the sites of an op whose saved tensors
    differ, and the ops of a module that one trace lacks, become one set. The same holds for the
    sites of one storage that the traces count at different sites: a ReLU's output is the next
    convolution's input, and counts only there if the ReLU stores bits.

    The result maps each site of a set to its bytes in both traces, in the order of the forward. The
    site with most planned bytes comes first. Sets without bytes are left out.

    Example:
        >>> before = [Record(Site("a", "gelu", "input"), (8,), "float32", 32, 32, "", "")]
        >>> after = [Record(Site("a", "gelu", "input"), (8,), "float32", 32, 3, "code", "")]
        >>> [{site.name: nbytes for site, nbytes in sites.items()} for sites in join(before, after)]
        [{'a / gelu / input': (32, 3)}]
    """
    left: dict[Site, int] = {}
    right: dict[Site, int] = {}
    for record in plain:
        left[record.site] = left.get(record.site, 0) + record.nbytes
    for record in planned:
        right[record.site] = right.get(record.site, 0) + record.planned
    groups = DisjointSets([*left, *right])
    _join_ops(groups, left, right)
    _join_storages(groups, plain, left, right)
    found = []
    for sites in groups.sets().values():
        sums = {site: (left.get(site, 0), right.get(site, 0)) for site in sites}
        if any(map(any, sums.values())):
            shown = max(sums, key=lambda site: sums[site][::-1])
            found.append({shown: sums[shown], **sums})
    return found


def _join_ops(groups: DisjointSets, left: dict[Site, int], right: dict[Site, int]) -> None:
    """Unite the differing sites of an op, and the ops of a module that one trace lacks."""
    modules: dict[str, dict[str, list[set[Site]]]] = {}
    for side, sums in enumerate((left, right)):
        for site in sums:
            ops = modules.setdefault(site.module, {})
            ops.setdefault(site.op, [set(), set()])[side].add(site)
    for ops in modules.values():
        for before, after in ops.values():
            if before != after:
                groups.union(before | after)
        lone = [before | after for before, after in ops.values() if not (before and after)]
        if any(after and not before for before, after in ops.values()):
            groups.union(set().union(*lone))


def _join_storages(
    groups: DisjointSets, plain: Sequence[Record], left: dict[Site, int], right: dict[Site, int]
) -> None:
    """Unite a group that only the plan counts with the baseline's group of the same storage."""
    counted = {record.storage: record.site for record in plain if record.nbytes}
    sums = {
        top: (sum(left.get(site, 0) for site in sites), sum(right.get(site, 0) for site in sites))
        for top, sites in groups.sets().items()
    }
    for record in plain:
        before, after = sums.get(groups.find(record.site), (1, 1))
        if after and not before and record.storage in counted:
            groups.union((record.site, counted[record.storage]))

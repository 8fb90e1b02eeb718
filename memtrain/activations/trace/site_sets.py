"""Disjoint sets of sites: those whose bytes are counted together."""

from collections.abc import Iterable

from memtrain.activations.saved.site import Site


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

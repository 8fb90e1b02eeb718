"""Sites that share memory or lean on one another: what is done to one, the others feel."""

from collections.abc import Sequence

from memtrain.activations.saved.site import Record, Site
from memtrain.activations.trace.site_sets import Groups
from memtrain.audit.join import join
from memtrain.config.sources import KEEP
from memtrain.planner.traces import Traces

DERIVED = "derived"
_SINCE = "computed again from what "


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

"""Treemaps of modules as SVG: areas are bytes, colours are categories."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from memtrain.audit.report import CATEGORIES, Report
from memtrain.cli.render.svg import COLOURS, picture, rectangle, text
from memtrain.cli.render.treemap import Box, squarify
from memtrain.cli.report.group_by import module_of
from memtrain.config.sizes import format_size

WIDTH, HEIGHT = 960, 480
_STRIP = 14  # the height of a module's name
_LEAST = 5.0  # a box with a shorter side is not divided further
_AREA = 60.0  # several smaller boxes beside each other are one


@dataclass
class Node:
    """A module: its own bytes by category, and the modules in it."""

    path: str = ""
    own: dict[str, int] = field(default_factory=dict)
    children: dict[str, "Node"] = field(default_factory=dict)

    def parts(self) -> dict[str, int]:
        """Bytes by category, of all that is in it."""
        return _added([self.own, *(child.parts() for child in self.children.values())])


def tree(report: Report, side: str) -> Node:
    """The modules of a report with their bytes.

    Args:
        report: The audit.
        side: `plain` or `planned`.

    Returns:
        The root; its parts are the report's totals.

    Example:
        >>> from memtrain.audit.report import Row
        >>> row = Row(name="h.0.fc.weight", kind="weight", plain=8, planned=8)
        >>> root = tree(Report(rows=(row,), kept=(), unmatched=(), loss=True), "plain")
        >>> root.parts(), root.children["h"].children["0"].path
        ({'weights': 8}, 'h.0')
    """
    root = Node()
    for row in report.rows:
        node = root
        for name in filter(None, module_of(row).split(".")):
            path = f"{node.path}.{name}".lstrip(".")
            node = node.children.setdefault(name, Node(path))
        category = CATEGORIES[row.kind]
        node.own[category] = node.own.get(category, 0) + getattr(row, side)
    return root


def treemap(report: Report, side: str) -> str:
    """Draw one side of a report; both sides are drawn at one scale.

    Args:
        report: The audit.
        side: `plain` or `planned`.

    Returns:
        An SVG element; its height is that of what it holds.
    """
    total = report.totals()["total"]
    share = (getattr(total, side) / (max(total.plain, total.planned) or 1)) ** 0.5
    width, height = WIDTH * share, HEIGHT * share
    drawn = _module(tree(report, side), Box(0.0, 0.0, width, height), "")
    return picture(WIDTH, max(1, round(height)), drawn, f"bytes by module, {side}")


def _module(node: Node, box: Box, outer: str) -> Iterator[str]:
    """A module's box: its name where there is room, then its own bytes and its modules."""
    while not node.own and len(node.children) == 1:  # of a.b.c with nothing besides, one box
        node = next(iter(node.children.values()))
    parts = node.parts()
    if not any(parts.values()):
        return
    if min(box.width, box.height) < _LEAST:
        yield _leaf(node.path, parts, box)
        return
    yield rectangle(box, "none", _hint(node.path, parts), class_="module")
    name = node.path.removeprefix(f"{outer}.") if outer else node.path
    named = bool(name) and box.width > 7 * len(name) + 6 and box.height > 2 * _STRIP
    if named:
        yield text(box.x + 3, box.y + _STRIP - 3, name, class_="small")
    inner = box.inner(1.0, _STRIP if named else 0.0)
    yield from _content(node, inner)


def _content(node: Node, box: Box) -> Iterator[str]:
    items: list[tuple[dict[str, int], Node | None]] = [({k: v}, None) for k, v in node.own.items()]
    items += [(child.parts(), child) for child in node.children.values()]
    items = [item for item in items if sum(item[0].values())]
    least = sum(node.parts().values()) * _AREA / (box.width * box.height or _AREA)
    small = [parts for parts, _ in items if sum(parts.values()) < least]
    if len(small) > 1:
        items = [item for item in items if sum(item[0].values()) >= least]
        items.append((_added(small), None))
    items.sort(key=lambda item: -sum(item[0].values()))
    boxes = squarify([sum(parts.values()) for parts, _ in items], box)
    for (parts, child), place in zip(items, boxes, strict=True):
        if child is None:
            yield _leaf(node.path, parts, place)
        else:
            yield from _module(child, place, node.path)


def _leaf(path: str, parts: Mapping[str, int], box: Box) -> str:
    """A box of the colour of what is most of it."""
    colour = COLOURS[max(parts, key=lambda part: parts[part])]
    return rectangle(box, colour, _hint(path, parts), class_="leaf")


def _hint(path: str, parts: Mapping[str, int]) -> str:
    words = [f"{part} {format_size(nbytes)}" for part, nbytes in parts.items() if nbytes]
    return "\n".join([path or "(root)", *words])


def _added(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for parts in several:
        for name, nbytes in parts.items():
            total[name] = total.get(name, 0) + nbytes
    return total

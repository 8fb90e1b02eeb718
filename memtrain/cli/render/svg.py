"""Pictures as SVG text: bars, areas, and what they are made of."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from memtrain.config.sizes import format_size

COLOURS = {
    "weights": "#4477aa",
    "gradients": "#ee6677",
    "optimizer states": "#228833",
    "saved activations": "#ccbb44",
    "recomputed activations": "#eeddaa",
    "inputs": "#66ccee",
    "temporaries": "#aa3377",
    "workspaces": "#bbbbbb",
    "allocator rounding": "#888888",
}
"""Part -> its colour (Paul Tol's bright scheme: told apart by the colour-blind too)."""


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """An element; attributes are escaped, content is taken as it is.

    Example:
        >>> tag("text", "a &lt; b", x=1.25, class_="name")
        '<text x="1.2" class="name">a &lt; b</text>'
    """
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{_number(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


def _number(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))


def rectangle(box: Sequence[float], fill: str, hint: str, **attributes: Any) -> str:
    """A filled box with what it says when pointed at."""
    x, y, width, height = map(float, box)
    sizes = {"x": x, "y": y, "width": width, "height": height}
    return tag("rect", tag("title", escape(hint)), **sizes, fill=fill, **attributes)


def text(x: float, y: float, words: str, **attributes: Any) -> str:
    """Words at a place."""
    return tag("text", escape(words), x=float(x), y=float(y), **attributes)


def picture(width: int, height: int, parts: Iterable[str], label: str) -> str:
    """A whole picture, as wide as there is room, up to `width` pixels."""
    return tag(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        style=f"max-width:{width}px",
    )


def bars(sides: Mapping[str, Mapping[str, int]], width: int = 960) -> str:
    """Stacked bars, one a side, at one scale.

    Args:
        sides: Name of a bar -> part -> bytes.
        width: Of the picture.

    Returns:
        An SVG element.

    Example:
        >>> bars({"plain": {"weights": 4}}).count("<rect")
        1
    """
    left, right, high = 80, 110, 34
    most = max((sum(parts.values()) for parts in sides.values()), default=0) or 1
    scale = (width - left - right) / most
    drawn = []
    for index, (name, parts) in enumerate(sides.items()):
        x, y = float(left), index * (high + 12) + 4
        drawn.append(text(left - 8, y + high / 2 + 5, name, text_anchor="end"))
        for part, nbytes in parts.items():
            if nbytes:
                hint = f"{name}: {part} {format_size(nbytes)}"
                drawn.append(rectangle((x, y, nbytes * scale, high), COLOURS[part], hint))
            x += nbytes * scale
        drawn.append(text(x + 8, y + high / 2 + 5, format_size(sum(parts.values()))))
    return picture(width, len(sides) * (high + 12) + 4, drawn, "bytes by category")


def legend(parts: Iterable[str]) -> str:
    """Colours and what they stand for, as an HTML list."""
    items = [
        tag("li", tag("i", "", style=f"background:{COLOURS[part]}") + escape(part))
        for part in parts
    ]
    return tag("ul", "".join(items), class_="legend")

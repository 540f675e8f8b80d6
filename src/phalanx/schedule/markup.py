"""HTML and SVG by construction: what is not markup already is escaped when it becomes a part of some.

    tag("text", "rank ", rank, class_="end", x=10)     <text class="end" x="10">rank 0</text>

`tag` alone makes markup of text, and escapes every attribute and every child that no `tag` has made. Formatting or adding two
pieces of markup gives plain text, which is escaped in turn: a slip shows as angle brackets on the page, never as an element.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .printable import printable

EMPTY = frozenset({"circle", "line", "meta", "path", "polygon", "polyline", "rect"})  # without children they end where they begin


class Markup(str):
    """Text that is markup. Only for what `tag` and `join` made, and for constants of ours such as the style of a page."""

    __slots__ = ()


NOTHING = Markup("")


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` means class and `data_x` data-x; an attribute that is None is left out."""
    listed = "".join(f' {_name(key)}="{_escaped(value)}"' for key, value in attributes.items() if value is not None)
    if not children and name in EMPTY:
        return Markup(f"<{name}{listed}/>")
    return Markup(f"<{name}{listed}>{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """The parts one after the other, those that are plain text escaped."""
    return Markup(between.join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def _escaped(value: object) -> str:
    return escape(printable(str(value)))  # control characters, too: XML has none, and half a surrogate pair cannot be saved


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")

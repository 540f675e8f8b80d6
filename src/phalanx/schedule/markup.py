"""Build HTML and SVG safely: text that is not already markup is escaped when it is inserted.

    tag("text", "rank ", rank, class_="end", x=10)     <text class="end" x="10">rank 0</text>

Only `tag` turns text into markup; it escapes every attribute and every child that was not made by `tag`. Formatting or adding two
pieces of markup gives plain text, which is escaped in turn: a mistake shows as angle brackets on the page, never as an element.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .printable import printable

EMPTY = frozenset({"circle", "line", "meta", "path", "polygon", "polyline", "rect"})  # written as <rect/> if without children


class Markup(str):
    """Text that is markup. Only for the results of `tag` and `join`, and for our constants such as a page's style."""

    __slots__ = ()


NOTHING = Markup("")


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Make an element. `class_` means class, `data_x` means data-x; attributes that are None are left out."""
    listed = "".join(f' {_name(key)}="{_escaped(value)}"' for key, value in attributes.items() if value is not None)
    if not children and name in EMPTY:
        return Markup(f"<{name}{listed}/>")
    return Markup(f"<{name}{listed}>{join(children)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Concatenate the parts, escaping plain text."""
    return Markup(between.join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def _escaped(value: object) -> str:
    return escape(printable(str(value)))  # also control characters: XML allows none, and a lone surrogate cannot be saved


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")

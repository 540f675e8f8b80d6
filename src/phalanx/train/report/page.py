"""The page itself: HTML with its style and its script inside, and a policy that forbids the browser to load anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from phalanx.train.report.plots import COLOURS, Series

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Figure:
    """A picture (SVG text) with its title, a legend of `series`, and a note. Where the picture is empty the page says so."""

    title: str
    picture: str
    legend: Sequence[Series] = ()
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text. `keyed`: the first cell has the colour of its run; `text`: cells are words rather than numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]] = field(default_factory=list)
    keyed: bool = False
    folded: bool = False
    text: bool = False
    head: bool = True
    empty: str = "Nothing."


def page(
    *,
    title: str,
    subtitle: str,
    status: str,
    facts: Sequence[tuple[str, str, str]],
    sections: Sequence[tuple[str, Sequence[Figure | Table]]],
) -> str:
    """The whole file. Everything that is not a picture is escaped here."""
    allowed = base64.b64encode(
        hashlib.sha256(SCRIPT.encode()).digest()
    ).decode()  # this script and no other, whatever a name holds
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    badge = f'<span class="badge {"good" if status in ("complete", "target reached") else "open"}">{escape(status)}</span>'
    cards = "".join(
        f'<div class="fact"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><p>{escape(below)}</p></div>'
        for name, value, below in facts
    )
    shown = [_section(name, items) for name, items in sections if items]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} · Phalanx</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<header>",
            f"<div><h1>{escape(title)}{badge if status else ''}</h1><p>{escape(subtitle)}</p></div>",
            '<button id="theme" type="button" aria-label="switch between light and dark">◐</button>',
            "</header>",
            "<main>",
            f'<dl class="facts">{cards}</dl>' if facts else "",
            *shown,
            "</main>",
            "<footer>Made by Phalanx.</footer>",
            '<div id="tip" hidden></div>',
            f"<script>{SCRIPT}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(name: str, items: Sequence[Figure | Table]) -> str:
    inside = "".join(_figure(item) if isinstance(item, Figure) else _table(item) for item in items)
    return f'<section><h2>{escape(name)}</h2><div class="grid">{inside}</div></section>'


def _figure(figure: Figure) -> str:
    legend = "".join(f'<span class="c{s.colour % COLOURS} {s.style}"><i></i>{escape(s.name)}</span>' for s in figure.legend)
    note = f'<p class="quiet">{escape(figure.note)}</p>' if figure.note else ""
    picture = figure.picture or '<p class="none">Nothing recorded.</p>'
    return (
        f'<figure class="{"whole" if figure.wide else ""}"><figcaption><h3>{escape(figure.title)}</h3>{note}'
        f'<div class="legend">{legend}</div></figcaption>{picture}</figure>'
    )


def _table(table: Table) -> str:
    kind = "words" if table.text else "numbers"
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f'<tr class="c{i % COLOURS}">'
        + "".join(
            f"<th>{'<i></i>' if table.keyed else ''}{escape(cell)}</th>" if place == 0 else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for i, row in enumerate(table.rows)
    )
    body = f'<table class="{kind}">{f"<thead><tr>{head}</tr></thead>" if table.head else ""}<tbody>{rows}</tbody></table>'
    inside = f'<div class="wide">{body}</div>' if table.rows else f'<p class="quiet">{escape(table.empty)}</p>'
    if table.folded:
        return f'<details class="whole"><summary>{escape(table.title)}</summary>{inside}</details>'
    caption = f"<figcaption><h3>{escape(table.title)}</h3></figcaption>" if table.title else ""
    return f'<figure class="whole">{caption}{inside}</figure>'

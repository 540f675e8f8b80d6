"""The page: HTML with its style and script inside, and a policy that forbids loading anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.schedule import viewer
from phalanx.schedule.markup import NOTHING, Markup, join, tag
from phalanx.train.report.plots import COLOURS, Series

# the viewer of schedules belongs to the page: one script, so that the policy allows one
STYLE = Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8") + viewer.STYLE)
SCRIPT = Markup((Path(__file__).parent / "page.js").read_text(encoding="utf-8") + viewer.SCRIPT)


@dataclass(frozen=True)
class Figure:
    """A picture (SVG) with its title, a legend of `series`, and a note. An empty picture becomes a note."""

    title: str
    picture: Markup
    legend: Sequence[Series] = ()
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text. `keyed`: the first cell has the colour of its run. `text`: cells hold words, not numbers."""

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
    """Build the whole file. Names may contain anything: `tag` escapes them, and the policy is a second defence."""
    allowed = base64.b64encode(
        hashlib.sha256(SCRIPT.encode()).digest()
    ).decode()  # this script and no other, whatever a name contains
    # default-src does not cover forms and base URIs
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; form-action 'none'; base-uri 'none'"
    badge = tag("span", status, class_=f"badge {'good' if status in ('complete', 'target reached') else 'open'}")
    cards = join(tag("div", tag("dt", name), tag("dd", value), tag("p", below), class_="fact") for name, value, below in facts)
    shown = [_section(name, items) for name, items in sections if items]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · Phalanx"),
        tag("style", STYLE),
    ]
    switch = tag("button", "◐", id="theme", type="button", aria_label="switch between light and dark")
    body = [
        tag("header", tag("div", tag("h1", title, badge if status else NOTHING), tag("p", subtitle)), switch),
        tag("main", tag("dl", cards, class_="facts") if facts else NOTHING, *shown),
        tag("footer", "Made by Phalanx."),
        tag("div", id="tip", hidden=""),
        tag("script", SCRIPT),
    ]
    whole = tag("html", tag("head", _lines(head)), "\n", tag("body", _lines(body)), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _lines(parts: Sequence[Markup]) -> Markup:
    """One part per line, to keep the source readable."""
    return join(["\n", join(parts, "\n"), "\n"])


def _section(name: str, items: Sequence[Figure | Table]) -> Markup:
    inside = join(_figure(item) if isinstance(item, Figure) else _table(item) for item in items)
    return tag("section", tag("h2", name), tag("div", inside, class_="grid"))


def _figure(figure: Figure) -> Markup:
    legend = join(tag("span", tag("i"), s.name, class_=f"c{s.colour % COLOURS} {s.style}") for s in figure.legend)
    note = tag("p", figure.note, class_="quiet") if figure.note else NOTHING
    caption = tag("figcaption", tag("h3", figure.title), note, tag("div", legend, class_="legend"))
    picture = figure.picture or tag("p", "Nothing recorded.", class_="none")
    return tag("figure", caption, picture, class_="whole" if figure.wide else "")


def _table(table: Table) -> Markup:
    mark = tag("i") if table.keyed else NOTHING
    head = tag("thead", tag("tr", *(tag("th", column) for column in table.columns))) if table.head else NOTHING
    rows = [
        tag("tr", tag("th", mark, first), *(tag("td", cell) for cell in rest), class_=f"c{i % COLOURS}")
        for i, (first, *rest) in enumerate(table.rows)
    ]
    body = tag("table", head, tag("tbody", *rows), class_="words" if table.text else "numbers")
    inside = tag("div", body, class_="wide") if table.rows else tag("p", table.empty, class_="quiet")
    if table.folded:
        return tag("details", tag("summary", table.title), inside, class_="whole")
    caption = tag("figcaption", tag("h3", table.title)) if table.title else NOTHING
    return tag("figure", caption, inside, class_="whole")

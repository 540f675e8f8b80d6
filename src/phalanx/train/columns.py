"""Format the numbers of a run in columns that fit a terminal: pure functions from values to lines.

    epoch    top-1    top-5  test loss  train loss  images/s       time        left
     3/24   97.22%   99.72%     0.6613      0.5812     4,406      0.8 s       5.1 s

A column comes from the key of a row. Unknown keys get a column, too, so another task needs no change here. If
a line is too long, it loses columns from the right, but never `epoch` and `left`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.train.duration import duration

GAP = "  "
ALWAYS = ("epoch", "left")


@dataclass(frozen=True, slots=True)
class Column:
    """How to show one number: its title, the characters that it may need, and its text."""

    title: str
    width: int
    text: Callable[[Any], str] = "{:.4g}".format


COLUMNS = {
    "epoch": Column("epoch", 5, str),
    "left": Column("left", 10, duration),  # 12:34:56 h
    "time": Column("time", 9, duration),
    "loss": Column("loss", 7, "{:.4f}".format),
    "test loss": Column("test loss", 9, "{:.4f}".format),
    "train loss": Column("train loss", 10, "{:.4f}".format),
    "accuracy": Column("accuracy", 6, "{:.1%}".format),
    "top1": Column("top-1", 7, "{:.2%}".format),
    "top5": Column("top-5", 7, "{:.2%}".format),
    "perplexity": Column("perplexity", 10, "{:.2f}".format),
    "spread": Column("spread", 7, "{:.1e}".format),  # of the replicas, before they were averaged
    "rate": Column("rate", 7, "{:.3g}".format),
    "wait_share": Column("waiting", 4, "{:.0%}".format),
    "batch": Column("batch", 5, "{:d}".format),
    "step": Column("step", 6, "{:d}".format),
}


def column(key: str) -> Column:
    """The column of a key, even if it is not in the table."""
    if key in COLUMNS:
        return COLUMNS[key]
    if key.endswith("_per_second"):
        title = f"{key.removesuffix('_per_second').replace('_', ' ')}/s"
        return Column(title, max(8, len(title)), "{:,.0f}".format)
    title = key.replace("_", " ")
    return Column(title, max(9, len(title)))


def choose(values: Mapping[str, Any], width: int) -> list[str]:
    """The keys whose columns fit into `width`. The last ones are dropped first, those of ALWAYS never."""
    chosen = list(values)
    while len(cells(chosen, values)) > width:
        losable = [key for key in chosen if key not in ALWAYS]
        if not losable:
            break
        chosen.remove(losable[-1])
    return chosen


def head(keys: Sequence[str], values: Mapping[str, Any]) -> str:
    """The titles above the columns of these values."""
    return GAP.join(f"{column(key).title:>{_room(key, values[key])}}" for key in keys)


def cells(keys: Sequence[str], values: Mapping[str, Any]) -> str:
    """The values below their titles."""
    return GAP.join(f"{_text(key, values[key]):>{_room(key, values[key])}}" for key in keys)


def fields(keys: Sequence[str], values: Mapping[str, Any], width: int) -> str:
    """One line without titles, `loss  0.0213  left  1:05 min`, with as many fields as fit into `width`."""
    line = ""
    for key in keys:
        field = f"{column(key).title} {_text(key, values[key]):>{column(key).width}}"
        if len(line) + len(GAP if line else "") + len(field) > width:
            break
        line += (GAP if line else "") + field
    return line


def _room(key: str, value: Any) -> int:
    """The width of a column, or of the value if that is longer."""
    return max(column(key).width, len(column(key).title), len(_text(key, value)))


def _text(key: str, value: Any) -> str:
    return "-" if value is None else column(key).text(value)

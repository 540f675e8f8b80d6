"""Write records of a benchmark as a table with the columns of nccl-tests, or as JSON lines, one record at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from phalanx.bench.record import Record


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, the key of a row, and how a value is written; None becomes a dash."""

    heading: str
    key: str
    width: int
    form: str = ""
    left: bool = False

    def cell(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)

    def of(self, row: Record) -> str:
        value = row.get(self.key)
        return self.cell("-" if value is None else format(value, self.form))


COLUMNS = {
    "allreduce": (
        Column("size(B)", "size", 11),
        Column("count", "count", 10),
        Column("type", "type", 6),
        Column("redop", "redop", 6),
        Column("contender", "contender", 24, left=True),
        Column("time(us)", "time_us", 11, ".1f"),
        Column("algbw(GB/s)", "algbw", 12, ".3f"),
        Column("busbw(GB/s)", "busbw", 12, ".3f"),
        Column("#wrong", "wrong", 7),
        Column("crowded", "crowded", 8, ".0%"),
        Column("x gloo", "times_gloo", 8, ".2f"),
    ),
    "train": (
        Column("contender", "contender", 24, left=True),
        Column("step(ms)", "step_ms", 10, ".2f"),
        Column("spread(ms)", "spread_ms", 11, ".2f"),
        Column("over none(ms)", "over_none_ms", 14, ".2f"),
        Column("x DDP", "times_ddp", 7, ".2f"),
        Column("#differ", "wrong", 8),
    ),
    "gossip": (
        Column("contender", "contender", 24, left=True),
        Column("step(ms)", "step_ms", 10, ".2f"),
        Column("over none(ms)", "over_none_ms", 14, ".2f"),
        Column("efficiency", "efficiency", 11, ".1%"),
        Column("bytes/step", "bytes", 12),
        Column("exchange(ms)", "exchange_ms", 13, ".2f"),
        Column("spread", "spread", 9, ".1e"),
    ),
}


def print_table() -> Callable[[Record], None]:
    """Return a function that prints the next record to standard output."""
    columns: tuple[Column, ...] = ()

    def lines(record: Record) -> list[str]:
        nonlocal columns
        if "config" in record:
            columns = COLUMNS[record["config"]["verb"]]
            return [*header_lines(record), "# " + " ".join(column.cell(column.heading) for column in columns)]
        if "seconds" in record:
            others = record["cores_used_by_others"]
            meanwhile = "" if others is None else f"; other work took {others:.2f} of a core meanwhile"
            return [f"# {record['seconds']:.1f} s{meanwhile}"]
        if "note" in record:
            return [f"# {record['contender']}: {record['note']}"]
        return ["  " + " ".join(column.of(record) for column in columns).rstrip()]

    def show(record: Record) -> None:
        sys.stdout.write("".join(f"{line}\n" for line in lines(record)))
        sys.stdout.flush()

    return show


def header_lines(record: Record) -> list[str]:
    """Format the first record."""
    config = record["config"]
    settings = {key: value for key, value in config.items() if key not in ("verb", "ranks") and value}
    what = ", ".join(f"{key} {' '.join(value) if isinstance(value, list | tuple) else value}" for key, value in settings.items())
    return [
        f"# phalanx bench {config['verb']}: {config['ranks']} ranks, {what}",
        f"# {record['date']}; " + ", ".join(f"{name} {found}" for name, found in record["versions"].items()),
        f"# {', '.join(record['hosts'])}: {record['processor']}, {record['cores']} cores, one thread per rank; "
        f"native core: {record['native_core']}",
        f"# started by {record['launcher']}; automatic schedule {record['schedule']}; medians of {config['repeat']} rounds, "
        "the slowest rank counts",
    ]


def write_lines(file: TextIO) -> Callable[[Record], None]:
    """Return a function that writes the next record as a line of JSON. Written lines survive a crash."""

    def write(record: Record) -> None:
        file.write(json.dumps(record) + "\n")
        file.flush()

    return write

"""Keep the rows of a run when rank 0 dies: it writes them, and every rank remembers the last ones.

All ranks make the same rows. If rank 0 of an elastic run dies, the next rank 0 reads the file, appends missing rows and
continues. So no row is lost or duplicated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.train.rows import Rows, read_rows
from phalanx.train.sinks import RunFacts, Sinks

Row = dict[str, Any]
FILE = "metrics.jsonl"
ALL = 1 << 62  # steps
REMEMBERED = 32  # rows; rank 0 writes a row before the next exchange, so the last few are enough


class Recorded:
    """The rows of a run, in `out` and in the sinks that `open_sinks` opens. `warn` is called once if the disk is full."""

    def __init__(self, out: Path | None, open_sinks: Callable[[], Sinks], warn: Callable[[str], None]) -> None:
        self._out, self._open_sinks, self._warn = out, open_sinks, warn
        self._rows: Rows | None = None
        self._sinks: Sinks | None = None
        self._last: deque[Row] = deque(maxlen=REMEMBERED)
        self._told_of_disk = False

    def open(self) -> None:
        """Make this rank the writer."""
        self._sinks = self._open_sinks()

    @property
    def writes(self) -> bool:
        return self._sinks is not None

    def begin(self, facts: RunFacts) -> None:
        """Begin, before the first row. Rows of an earlier start are kept up to its step."""
        if self._out is not None:
            self._rows = Rows(self._out / FILE, keep_to_step=facts.step if facts.resume else None)
        if self._sinks is not None:
            self._sinks.begin(facts)

    def take_over(self, facts: RunFacts) -> None:
        """Continue for a writer that died, and append rows that it did not write."""
        missing = list(self._last)
        if self._out is not None:
            there = {_key(row) for row in read_rows(self._out / FILE)}
            missing = [row for row in self._last if _key(row) not in there]
            self._rows = Rows(self._out / FILE, keep_to_step=ALL)
        self.open()
        if self._sinks is not None:
            self._sinks.begin(facts)
        for row in missing:
            self._put(row)

    def write(self, row: Row) -> None:
        """Record a row, on all ranks. A full disk does not stop training."""
        self._last.append(row)
        self._put(row)

    def tell(self, row: Row) -> None:
        """Send a row to the sinks only."""
        if self._sinks is not None:
            self._sinks.write(row)

    def _put(self, row: Row) -> None:
        try:
            if self._rows is not None:
                self._rows.write(row)
        except OSError as error:
            if not self._told_of_disk:
                self._told_of_disk = True
                self._warn(f"rows are missing from {self._out}: {error.strerror or error}; training continues")
        self.tell(row)

    def close(self) -> None:
        """Close after the last row. OSError for a full disk, already warned about."""
        sinks, self._sinks = self._sinks, None
        if sinks is not None:
            sinks.close()
        if self._rows is not None:
            self._rows.close()

    # ---- for a rank that joins -------------------------------------------------------------------------------------------------

    def state(self) -> list[Row]:
        return list(self._last)

    def load(self, rows: Iterable[Row]) -> None:
        self._last = deque(rows, maxlen=REMEMBERED)


def _key(row: Row) -> tuple[Any, ...]:
    """The key that identifies a row within its run."""
    return row.get("kind"), row.get("membership") if row.get("kind") == "membership" else row.get("step")

"""Show the progress of a run: one line redrawn in place on a terminal, one line per evaluation in a file.

epoch 12.3/30 ━━━━━━────────  left  5.1 s  loss  0.0213  accuracy  99.2%  images/s    2,335  rate  0.0467  ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from phalanx.schedule.printable import printable
from phalanx.train.columns import cells, choose, fields, head
from phalanx.train.config import RunConfig
from phalanx.train.duration import duration
from phalanx.train.task import SPEED, Task

REDRAW = 0.2  # seconds between two redraws
BAR = 16  # characters
BAR_FROM = 64  # columns of a terminal that has room for the bar
UNLIMITED = 1000  # columns of a file
DIM, BOLD, YELLOW, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[33m", "\x1b[0m"

LESS_IMPORTANT = ("rate", "wait_share", "batch", "step")  # of the live line, after the task's results and the speed
NOT_SHOWN = ("kind", "epoch", "seconds", "groups", "overlapped_share")


def show_progress(config: RunConfig, stream: TextIO | None = None) -> Progress:
    """Create the progress display for a stream: redrawn and coloured on a capable terminal, unless NO_COLOR is set."""
    stream = stream or sys.stdout
    if stream is None:  # standard output was closed before Python started
        return Progress(config, None, live=False, colour=False)
    live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Progress(config, stream, live=live, colour=live and not os.environ.get("NO_COLOR"))


class Progress:
    """Written to `stream`; `live` redraws a line in place, as terminals can."""

    def __init__(self, config: RunConfig, stream: TextIO | None, *, live: bool, colour: bool) -> None:
        # the command line's streams escape control characters, which this line needs
        self.config, self.stream, self.live, self.colour = config, getattr(stream, "own", stream), live, colour
        self._drawn, self._shown = 0.0, False
        self._row: dict[str, Any] = {}
        self._left: float | None = None
        self._head = ""  # the titles above the last evaluation

    @property
    def width(self) -> int:
        """Characters of a line; the last column of a terminal would wrap."""
        return shutil.get_terminal_size().columns - 1 if self.live else UNLIMITED

    def interval(self, row: dict[str, Any], ranks: int, left: float) -> None:
        """Show the means of an interval, and an estimate of the seconds left."""
        self._row, self._left = row, left
        if self.live and time.perf_counter() - self._drawn > REDRAW:
            self._draw(self._coloured(line(row, ranks, self.config.epochs, left, self.width)))

    def evaluation(self, epoch: int, found: dict[str, float], seconds: float) -> None:
        values = evaluation_values(epoch, self.config.epochs, found, self._row, seconds, self._left)
        keys = choose(values, self.width)
        titles = head(keys, values)
        if titles != self._head:
            self._head = titles
            self.say(titles)
        self.say(cells(keys, values))

    def warn(self, words: str) -> None:
        """Print a permanent line in yellow."""
        self._keep(f"{YELLOW}{printable(words)}{PLAIN}" if self.colour else printable(words))

    def say(self, *lines: str) -> None:
        """Print permanent lines."""
        for words in lines:
            self._keep(printable(words))

    def _keep(self, words: str) -> None:
        self._erase()
        self._put(f"{words}\n")

    def end(self, result: Any, out: Path | None, report: Path | None = None) -> None:
        """Print how the run ended and where its report is."""
        text = ending(result, self.config.find_task())
        self._keep(f"{BOLD}{text}{PLAIN}" if self.colour else text)
        if report is not None:
            self.say(f"report: {report}")
        elif out is not None:
            self.say(f"records: {out}")

    def close(self) -> None:
        self._erase()

    def _draw(self, words: str) -> None:
        self._put(f"\r\x1b[K{words}")
        self._shown, self._drawn = True, time.perf_counter()

    def _erase(self) -> None:
        if self._shown:
            self._put("\r\x1b[K")
            self._shown = False

    def _put(self, text: str) -> None:
        """Write. If the output is full or closed, training continues without output."""
        if self.stream is None:
            return
        try:
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.stream.flush()
        except (OSError, ValueError) as error:
            self.stream = None
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"phalanx: progress is no longer shown: {error}\n")

    def _coloured(self, text: str) -> str:
        """Dim the unfinished part of the bar."""
        first, last = text.find("─"), text.rfind("─")
        return text if not self.colour or first < 0 else f"{text[:first]}{DIM}{text[first : last + 1]}{PLAIN}{text[last + 1 :]}"


def line(row: dict[str, Any], ranks: int, epochs: int, left: float, width: int) -> str:
    """The state of a run, most important first. Fields that do not fit into `width` characters are left out."""
    full = min(BAR, int(BAR * row["epoch"] / epochs))
    bar = f" {'━' * full}{'─' * (BAR - full)}" if width >= BAR_FROM else ""
    begin = f"epoch {row['epoch']:{len(str(epochs)) + 2}.1f}/{epochs}{bar}"[:width]
    values = {"left": left, **row}
    rest = fields(["left", *live_keys(row, ranks)], values, width - len(begin) - 2)
    return f"{begin}  {rest}" if rest else begin


def live_keys(row: dict[str, Any], ranks: int) -> list[str]:
    """The keys of a row in the order of their importance: what the task measures, the speed, and the rest."""
    measured, speeds = [], []
    for key in numbers(row):
        if key.endswith(SPEED):
            speeds.append(key)
        elif key not in LESS_IMPORTANT:
            measured.append(key)
    return [*measured, *speeds, *(key for key in LESS_IMPORTANT if key in row and not (key == "wait_share" and ranks == 1))]


def numbers(row: dict[str, Any]) -> Iterable[str]:
    """The keys that hold a number to show."""
    return (key for key, value in row.items() if key not in NOT_SHOWN and isinstance(value, int | float))


def evaluation_values(
    epoch: int, epochs: int, found: dict[str, float], row: dict[str, Any], seconds: float, left: float | None
) -> dict[str, Any]:
    """The values of an evaluation, most important first: what it `found`, the last interval `row` if any, and the time."""
    values: dict[str, Any] = {"epoch": f"{epoch}/{epochs}".rjust(2 * len(str(epochs)) + 1)}
    values |= {"test loss" if key == "loss" else key: value for key, value in found.items()}
    values["train loss"] = row.get("loss")
    values |= {key: row[key] for key in numbers(row) if key.endswith(SPEED)}
    return values | {"time": seconds, "left": 0.0 if epoch >= epochs else left}


def ending(result: Any, task: Task) -> str:
    """How a run ended, in a sentence."""
    words = {"epochs": "done", "target": "target reached", "stopped": "stopped on request; --resume continues"}[result.why]
    after = f"after {result.epochs} epochs, {result.steps} steps, {duration(result.seconds)}"
    return f"{words}: {' '.join(filter(None, [task.verdict(result.found), after]))}"

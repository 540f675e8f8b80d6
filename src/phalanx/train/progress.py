"""What you see of a run: on a terminal a line that is redrawn in place, in a file one line per evaluation.

epoch 12.3/30 ━━━━━━────────  loss 0.0213  accuracy 99.2%  2,335 images/s (1,168 per rank)  left 5.1 s  rate 0.0467  ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from phalanx.schedule.printable import printable
from phalanx.train.config import RunConfig
from phalanx.train.duration import duration
from phalanx.train.task import SPEED

REDRAW = 0.2  # seconds between two drawings, enough for the eye
BAR = 16  # characters
DIM, BOLD, YELLOW, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[33m", "\x1b[0m"


def show_progress(config: RunConfig, stream: TextIO | None = None) -> Progress:
    """The progress for where output goes: redrawn and coloured on a terminal that can, unless NO_COLOR is set."""
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
        self.task = config.find_task()
        self._drawn, self._shown = 0.0, False
        self._row: dict[str, Any] = {}

    def interval(self, row: dict[str, Any], ranks: int, left: float) -> None:
        """The means of an interval, and an estimate of the seconds left."""
        self._row = row
        if self.live and time.perf_counter() - self._drawn > REDRAW:
            width = shutil.get_terminal_size().columns - 1  # the last column would wrap
            self._draw(self._coloured(line(row, ranks, self.config.epochs, left, width)))

    def evaluation(self, epoch: int, found: dict[str, float], seconds: float) -> None:
        row = self._row
        train = f"  train loss {row['loss']:.4f}  {'{:,.0f} {}/s'.format(*speed_of(row))}" if row else ""
        digits = len(str(self.config.epochs))
        spread = f"  spread {found['spread']:.1e}" if "spread" in found else ""  # of the replicas, before they were averaged
        self.say(
            f"epoch {epoch:{digits}d}/{self.config.epochs}{train}  test {'  '.join(self.task.results(found))}"
            f"{spread}  {duration(seconds)}"
        )

    def warn(self, words: str) -> None:
        """A line that stays, in yellow."""
        self._keep(f"{YELLOW}{printable(words)}{PLAIN}" if self.colour else printable(words))

    def say(self, words: str) -> None:
        """A line that stays."""
        self._keep(printable(words))

    def _keep(self, words: str) -> None:
        self._erase()
        self._put(f"{words}\n")

    def end(self, result: Any, out: Path | None) -> None:
        words = {"epochs": "done", "target": "target reached", "stopped": "stopped on request; --resume continues"}[result.why]
        after = f"after {result.epochs} epochs, {result.steps} steps, {duration(result.seconds)}"
        text = f"{words}: {' '.join(filter(None, [self.task.verdict(result.found), after]))}"
        self._keep((f"{BOLD}{text}{PLAIN}" if self.colour else text) + (printable(f"; {out}") if out else ""))

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
        """Write. If the output is full or closed, training continues and shows nothing more."""
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
        """Dim the part of the bar that is still to come."""
        first, last = text.find("─"), text.rfind("─")
        return text if not self.colour or first < 0 else f"{text[:first]}{DIM}{text[first : last + 1]}{PLAIN}{text[last + 1 :]}"


def speed_of(row: dict[str, Any]) -> tuple[float, str]:
    """The speed in a row, and its unit, by the task: images, characters, ..."""
    key = next(key for key in row if key.endswith(SPEED))
    return row[key], key.removesuffix(SPEED)


def line(row: dict[str, Any], ranks: int, epochs: int, left: float, width: int) -> str:
    """The state of a run, the most important first; fields that do not fit into `width` characters are left out."""
    full = min(BAR, int(BAR * row["epoch"] / epochs))
    speed, unit = speed_of(row)
    fields = [
        f"epoch {row['epoch']:.1f}/{epochs} {'━' * full}{'─' * (BAR - full)}",
        f"loss {row['loss']:.4f}",
        *([f"accuracy {row['accuracy']:.1%}"] if "accuracy" in row else []),
        f"{speed:,.0f} {unit}/s",
        f"left {duration(left)}",
        f"rate {row['rate']:.3g}",
        f"waiting {row['wait_share']:.0%}",
        f"batch {row['batch']}",
        f"step {row['step']}",
        f"{speed / ranks:,.0f} {unit}/s per rank",
    ]
    if ranks == 1:
        fields = [field for field in fields if not field.startswith("waiting") and not field.endswith("per rank")]
    text = fields[0][:width]
    for field in fields[1:]:
        if len(text) + 2 + len(field) > width:
            break
        text += f"  {field}"
    return text

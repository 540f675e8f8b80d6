"""Safe output for the command line: everything that it prints goes through here.

Names in schedule, cluster and shard files may contain control sequences, and standard output may be full, closed or ASCII. While
a verb runs, `guarded` replaces both streams by an `Output`. It escapes control sequences and characters that the encoding lacks.
It raises `OutputError` if standard output is full or closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from phalanx.schedule.printable import one_line, printable

LONGEST = 2000  # characters of a line on standard error; longer ones only repeat the user's input


class OutputError(Exception):
    """Standard output is full or closed. Not an OSError: verbs catch those for their own files."""

    def __init__(self, error: BaseException) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        super().__init__(f"cannot write to standard output: {reason}")
        self.reader_left = isinstance(error, BrokenPipeError)  # such as `head`, once it has enough


class Output:
    """A stream for untrusted text. `own` is the underlying stream, for our own control sequences (a progress line)."""

    def __init__(self, stream: TextIO | None, *, raises: bool) -> None:
        self.own: TextIO | None = stream
        self._raises = raises

    def write(self, text: str) -> int:
        with self._failing():
            if self.own is None:  # closed when Python started
                raise ValueError("it is closed")
            encoding = getattr(self.own, "encoding", None) or "utf-8"
            self.own.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._failing():
            if self.own is not None:
                self.own.flush()

    def isatty(self) -> bool:
        return self.own is not None and self.own.isatty()

    def __getattr__(self, name: str) -> Any:  # fileno, encoding, ...
        return getattr(self.own, name)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it was closed in the meantime
            if self._raises:
                raise OutputError(error) from None


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Send everything printed inside through an `Output`. Errors of standard error itself are ignored."""
    before = sys.stdout, sys.stderr
    if None in before:
        _occupy_descriptors()
    sys.stdout, sys.stderr = Output(before[0], raises=True), Output(before[1], raises=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        _flush_errors()


def _occupy_descriptors() -> None:
    """Open /dev/null as 0, 1 or 2 if one was closed. Otherwise the next file would get that number and library output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def tell(message: object) -> None:
    """Print one line on standard error: what went wrong, or what was done."""
    text = one_line(str(message).strip())
    print(f"phalanx: {text if len(text) <= LONGEST else f'{text[:LONGEST]} ...'}", file=sys.stderr)


def forgive_output() -> None:
    """Ignore errors of standard output, for a verb whose result is in files."""
    try:
        sys.stdout.flush()
    except OutputError:
        give_up_output()


def give_up_output() -> None:
    """Send standard output to /dev/null, so that Python's last flush succeeds."""
    _give_up(sys.stdout)


def _flush_errors() -> None:
    """Give up standard error if it cannot be written: Python's last flush would fail and set the exit code to 120."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = stream.fileno()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, descriptor)
        os.close(sink)

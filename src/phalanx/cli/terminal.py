"""What the command line prints, whatever is in it and wherever it goes: the one way to standard output and standard error.

Names from schedule, cluster and shard files may hold control sequences, and standard output may be full, closed or ASCII. While
a verb runs, `guarded` puts an `Output` in the place of both streams: a terminal can only show what passes it, what an encoding
lacks is written out, and a stream that takes no more raises `OutputError`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from phalanx.schedule.printable import one_line, printable

LONGEST = 2000  # characters of a line on standard error: if you typed 5000 digits, you know the rest


class OutputError(Exception):
    """Standard output takes no more. No OSError: a verb that cannot write its files catches those."""

    def __init__(self, error: BaseException) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        super().__init__(f"cannot write to standard output: {reason}")
        self.reader_left = isinstance(error, BrokenPipeError)  # `head` for one: it has seen enough


class Output:
    """A stream for text of any origin. `own` is the stream below, for control sequences of our own (a progress line)."""

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
        except (OSError, ValueError) as error:  # ValueError: it was closed since
            if self._raises:
                raise OutputError(error) from None


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Let everything printed inside pass an `Output`. If standard error takes no more, nobody is left to be told."""
    before = sys.stdout, sys.stderr
    if None in before:
        _occupy_descriptors()
    sys.stdout, sys.stderr = Output(before[0], raises=True), Output(before[1], raises=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _occupy_descriptors() -> None:
    """Where 0, 1 or 2 was closed, the next file to be opened would get it, and with it what a library prints there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def tell(message: object) -> None:
    """Say what went wrong, or what was done, in one line on standard error."""
    text = one_line(str(message).strip())
    print(f"phalanx: {text if len(text) <= LONGEST else f'{text[:LONGEST]} ...'}", file=sys.stderr)


def forgive_output() -> None:
    """For a verb whose work is in files: it has not failed because the screen takes no more."""
    try:
        sys.stdout.flush()
    except OutputError:
        give_up_output()


def give_up_output() -> None:
    """Let Python find nothing wrong when it flushes standard output at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdout.fileno()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, descriptor)
        os.close(sink)

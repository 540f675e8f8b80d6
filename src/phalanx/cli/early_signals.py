"""Handle SIGTERM and Ctrl-C before a verb does: exit at once, without the traceback of an unfinished import."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from phalanx.comm.start import ASKS


@contextlib.contextmanager
def ending_at_once(words: str | None) -> Iterator[None]:
    """Inside, a signal prints `words` and ends this process. None prints nothing, for a rank whose agent prints it.

    Also unblocks signals that the agent blocked while Python started. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"phalanx: {words}\n".encode())
        os._exit(128 + number)

    before = {number: signal.signal(number, signal.SIG_DFL if words is None else leave) for number in ASKS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

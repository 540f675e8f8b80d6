"""A request to stop, by SIGTERM or Ctrl-C, as a flag that a training loop polls and all ranks agree on.

with StopRequest(comm) as stop:
    for step, batch in enumerate(loader):
        ...
        if stop.agreed():
            checkpoints.save(step, ...)
            break
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.settings import AGENT
from phalanx.comm.verdict import CommunicationError

HEARD = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds: torchrun repeats the signal that the terminal sent to all ranks, which is not a second Ctrl-C
STDERR = 2  # standard error, bypassing Python's buffers, which the signal may have interrupted


class StopSignals:
    """Inside its `with`, records SIGTERM and SIGINT in `heard` instead of ending the process. A second SIGINT ends it.

    Prints `words` at the first signal, if the process `speaks`. Outside the main thread it does nothing.
    """

    def __init__(self, words: str = "", *, speaks: bool = True) -> None:
        self.words, self.heard = words, 0
        self._speaks = speaks
        self._interrupted = 0.0
        # other launchers may repeat the signal; ours sends it once, and a single rank has no launcher
        self._same = SAME if "RANK" in os.environ and AGENT not in os.environ else 0.0
        self._before: dict[int, Any] = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted and now - self._interrupted > self._same:
                self._say("ended at once, without saving")
                os._exit(128 + number)
            self._interrupted = self._interrupted or now
        if not self.heard:
            self.heard = number
            self._say(self.words)

    def _say(self, words: str) -> None:
        if self._speaks and words:
            before = "\n" if os.isatty(STDERR) else ""  # the cursor of a terminal is after a progress line and ^C
            with contextlib.suppress(OSError):  # closed, or full
                os.write(STDERR, f"{before}{words}\n".encode())

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._before = {number: signal.signal(number, self._hear) for number in HEARD}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # after a failure, launchers send SIGTERM to the remaining ranks: ignore it while a checkpoint is finished
            if number != signal.SIGTERM or not isinstance(error, CommunicationError):
                signal.signal(number, handler)


class StopRequest:
    """Whether any rank was asked to stop. Rank 0 prints `words` at the first signal.

    Listens inside its `with`, or uses `signals` of an outer `with`, which may have recorded one already.
    """

    def __init__(self, comm: Communicator, words: str = "", signals: StopSignals | None = None) -> None:
        self._comm = comm
        self._own = signals is None
        self._signals = signals or StopSignals(words, speaks=comm.rank == 0)
        self._signals.words = words
        self.signal = 0  # the one that all ranks agreed on

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all ranks, which call it together."""
        self.signal = int(self._comm.all_reduce(torch.tensor([self._signals.heard], dtype=torch.int32), "max").item())
        return self.signal != 0

    def __enter__(self) -> StopRequest:
        if self._own:
            self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._own:
            self._signals.__exit__(kind, error, where)

"""A request to stop, by SIGTERM or Ctrl-C, as a flag that a training loop polls and all ranks agree on.

with StopRequest(comm) as stop:
    for step, batch in enumerate(loader):
        ...
        if stop.agreed():
            checkpoints.save(step, ...)
            break
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import CommunicationError

HEARD = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds: a launcher repeats the signal that the terminal sent to all ranks; that is not a second Ctrl-C
IN_SIGHT = 2  # standard error, without Python's buffers, which the signal may have interrupted


class StopRequest:
    """Inside its `with`, SIGTERM and SIGINT set a flag instead of ending the process; a second SIGINT ends it at once.

    Rank 0 prints `words` at the first signal. A rank that is a thread receives no signals.
    """

    def __init__(self, comm: Communicator, words: str = "") -> None:
        self._comm, self._words = comm, words
        self.signal = 0  # the one that all ranks agreed on
        self._heard = 0
        self._interrupted = 0.0
        self._before: dict[int, Any] = {}

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all ranks, which call it together."""
        self.signal = int(self._comm.all_reduce(torch.tensor([self._heard], dtype=torch.int32), "max").item())
        return self.signal != 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted and now - self._interrupted > SAME:
                self._say("ended at once, without saving")
                os._exit(128 + number)
            self._interrupted = self._interrupted or now
        if not self._heard:
            self._heard = number
            self._say(self._words)

    def _say(self, words: str) -> None:
        if self._comm.rank == 0 and words:
            os.write(IN_SIGHT, f"{words}\n".encode())

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._before = {number: signal.signal(number, self._hear) for number in HEARD}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # after a failure launchers send SIGTERM to the ranks that are left: ignore it while a checkpoint is finished
            if number != signal.SIGTERM or not isinstance(error, CommunicationError):
                signal.signal(number, handler)

"""SIGTERM, the word of a scheduler that takes the machine back, as a flag: a training loop polls it, and all ranks agree on it.

with StopRequest(comm) as stop:
    for step, batch in enumerate(loader):
        ...
        if stop.agreed():
            checkpoints.save(step, ...)
            break
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from phalanx.comm.communicator import Communicator


class StopRequest:
    """Inside its `with`, SIGTERM does not end the process but is remembered; for a rank that is a thread there is no SIGTERM."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._heard = False
        self._before: Any = None

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all ranks, which call it together."""
        return bool(self._comm.all_reduce(torch.tensor([self._heard], dtype=torch.int32), "max").item())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # the only one that may
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

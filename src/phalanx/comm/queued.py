"""Operations on a GPU: the calling thread queues them, and a separate thread checks that they end.

NCCL's calls return at once, so the caller makes them itself, in its own order and on its own device. What remains is to notice an
operation that never ends. Its kernel may wait for a rank that has died or is doing something else, and the host notices only when
it waits for the device, perhaps forever. So a thread polls the events of the operations, oldest first. It gives up an operation
that takes too long, which aborts NCCL's kernels, and every later call raises the error.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from phalanx.comm.activity import Activity
from phalanx.comm.breakdown import Breakdown
from phalanx.comm.forks import Owner
from phalanx.comm.pending import Operation, Pending, Waiter
from phalanx.comm.transports import TransportError

LOOK = 0.1  # seconds between two polls of the device


class DeviceQueue:
    """The operations that were queued and may still be running, in order."""

    def __init__(self, owner: Owner, activity: Activity, breakdown: Breakdown, waiter: Waiter) -> None:
        self._owner, self._activity, self._breakdown, self._waiter = owner, activity, breakdown, waiter
        self._lock = threading.Lock()
        self._pending: deque[Operation] = deque()
        self._news = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def used(self) -> bool:
        """Whether anything was ever queued on a GPU."""
        return self._thread is not None

    def queue(self, operation: Operation) -> Pending:
        """Run its work in the calling thread, which takes no time, and watch that it ends."""
        self._owner.check(operation.name)
        self._breakdown.check(operation.name)
        try:
            with self._lock, operation.order:  # autograd calls hooks in its own threads
                operation.result = operation.work()
        except TransportError as error:
            raise self._breakdown.failed(operation, str(error)) from error
        operation.ended = time.perf_counter()
        operation.finished.set()
        self._watch(operation)
        return Pending(operation, self._waiter)

    def _watch(self, operation: Operation) -> None:
        """Keep its name and events, but none of its tensors."""
        self._pending.append(operation.without_tensors())
        if self._thread is None:
            device = operation.order.device
            self._thread = threading.Thread(target=self._poll, args=[device], name="phalanx-device", daemon=True)
            self._thread.start()
        self._news.set()

    def stop(self) -> None:
        """Wait until everything has ended or was given up, then end the thread. Idempotent."""
        self._stopping = True
        self._news.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._breakdown.patience + 1.0)

    def _poll(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # a thread starts on device 0, and would create a context there
        while self._breakdown.error is None:
            if not self._pending:
                if self._stopping:
                    return
                self._news.wait()
                self._news.clear()
                continue
            self._look_at(self._pending[0])

    def _look_at(self, oldest: Operation) -> None:
        activity = self._activity
        if oldest.order.done():
            self._pending.popleft()
            activity.on_device, activity.last, activity.idle_since = None, oldest.name, time.monotonic()
            if self._pending:
                self._pending[0].alive = time.monotonic()  # it could not start before this one ended
            return
        if activity.on_device is not oldest:
            oldest.alive = time.monotonic()  # while the device computes, this rank is late and not stuck; the others time out
            activity.on_device = oldest if oldest.order.reached() else None
        why = self._breakdown.hopeless(oldest)
        if why is not None:
            self._breakdown.found(oldest, why)
        else:
            time.sleep(LOOK)

"""One thread per rank starts every communication, in the order of the calls.

torch needs one global order of operations over all process groups, and gloo's wait() blocks. A separate thread keeps that order,
and leaves the training thread free to compute, or to notice that a wait cannot succeed (`waiting.py`, `breakdown.py`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.comm import forks
from phalanx.comm.activity import Activity
from phalanx.comm.breakdown import Breakdown, breaks_the_network
from phalanx.comm.failure import Watch
from phalanx.comm.landing import land_later
from phalanx.comm.pending import Operation, Pending
from phalanx.comm.queued import DeviceQueue
from phalanx.comm.transports import TransportError
from phalanx.comm.waiting import Waiting
from phalanx.native.errors import SharedMemoryError


class Issuer:
    """The thread and its queue. `cut` breaks the transport's connections, so that operations that wait for a message fail."""

    def __init__(self, timeout: float, watch: Watch | None, cut: Callable[[], None] | None = None) -> None:
        self.owner = forks.Owner()
        self.activity = Activity()
        self.breakdown = Breakdown(timeout, watch, self.activity, self._cut_off)
        self._waiting = Waiting(self.owner, self.activity, self.breakdown)
        self.device = DeviceQueue(self.owner, self.activity, self.breakdown, self._waiting)
        self._cut = cut
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._submitted = self._completed = 0
        if watch is not None:
            watch.start(self.activity.state, self.stop)

    # ---- in the calling thread ---------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> Pending:
        """Queue `operation` behind everything submitted earlier."""
        self.owner.check(operation.name)
        self.breakdown.check(operation.name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._issue, name="phalanx-issuer", daemon=True)
            self._thread.start()
        self._submitted += 1
        self._queue.put(operation)
        return Pending(operation, self._waiting)

    @property
    def idle(self) -> bool:
        """Whether no operation is pending and none has failed, so that the calling thread may communicate itself."""
        return self._submitted == self._completed and self.breakdown.error is None

    def directly(self, work: Callable[[], Any], describe: Callable[[], Operation]) -> Any:
        """Run `work` in the calling thread, while the issuer is `idle`. A failure is handled like any other."""
        if self.owner.forks != forks.count:
            self.owner.check(describe().name)
        activity = self.activity
        activity.doing = describe
        try:
            result = work()
        except (TransportError, SharedMemoryError) as error:
            if not breaks_the_network(error):
                raise
            activity.current = describe()  # not reset: it is this rank's answer to alarms
            raise self.breakdown.failed(activity.current, str(error)) from error
        finally:
            activity.doing = None
        activity.last, activity.idle_since = describe, time.monotonic()
        return result

    # ---- in the issuing thread ---------------------------------------------------------------------------------------------

    def _issue(self) -> None:
        activity = self.activity
        broken: BaseException | None = None  # the error that ended all communication; the calling thread may not know it yet
        while (operation := self._queue.get()) is not None:
            if broken is not None:
                operation.error = broken
                operation.finished.set()
                continue
            operation.alive = time.monotonic()
            activity.current = operation
            try:
                operation.order.claim_thread()
                with operation.order:
                    operation.result = operation.work()
            except BaseException as error:  # noqa: BLE001  raised in the thread that waits
                operation.error = error
                if breaks_the_network(error) and not operation.may_fail:
                    broken = error
                    operation.finished.set()
                    continue  # `current` is not reset: it is this rank's answer to alarms
            activity.last, activity.idle_since = operation.name, time.monotonic()
            activity.current = None
            self._completed += 1
            operation.ended = time.perf_counter()
            if operation.landing is None or (operation.may_fail and operation.error is not None):
                operation.finished.set()
            else:
                land_later(operation, operation.landing, activity)
            del operation  # and its tensors: the next operation may come much later

    # ---- the end -----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Finish what is queued or pending, then end the thread. Abandon what does not finish soon. Idempotent."""
        if self._thread is not None and self.breakdown.error is None:
            self._queue.put(None)
            if not self._join(1.0):
                self._cut_off()
        self.device.stop()

    def _join(self, seconds: float) -> bool:
        """Wait for all threads, and return whether they ended in time."""
        until = time.monotonic() + seconds
        issuing = [] if self._thread is None else [self._thread]
        for thread in issuing:
            thread.join(seconds)
        threads = [*issuing, *self.activity.flying]  # only now: the issuing thread starts others until it ends
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _cut_off(self) -> None:
        """Get the thread out of the transport. If it is still there when Python exits, the process ends with SIGABRT."""
        if self._thread is not None:
            self._queue.put(None)  # an idle thread then ends at once, because no operation can start any more
        if self._cut is not None and (self._thread is not None or self.device.used):
            self._cut()
            self._join(1.0)

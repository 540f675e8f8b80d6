"""One thread per rank starts every communication, in the order of the calls.

torch wants one global order of operations over all process groups, and gloo's wait() blocks. A separate thread keeps that order,
and leaves the training thread free to compute, or to notice that a wait has become hopeless.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.comm.failure import CommunicationError, State, Watch
from phalanx.comm.pending import Operation, Pending
from phalanx.comm.traffic import Traffic
from phalanx.comm.transports import TransportError
from phalanx.native.errors import Disagreement, Refused, SharedMemoryError

LOOK = 0.1  # seconds between two looks at the clock and the alarm while waiting
AFTERMATH = 2.0  # seconds without progress after which messages of a rank that has ended are no longer expected

_forks = 0  # how often this process and its ancestors were forked: os.getpid() would cost more than a small sum


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Issuer:
    """The thread and its queue. It knows what this rank is doing, and so answers other ranks' alarms."""

    def __init__(self, timeout: float, watch: Watch | None, cut: Callable[[], None] | None = None) -> None:
        self._timeout = timeout
        self.patience = timeout - (watch.grace if watch else 0.0)  # the verdict is due within the timeout as well
        self._watch = watch
        self.traffic: Traffic | None = None  # which messages are under way, where the transport knows
        self._cut = cut  # breaks the transport's connections, so that work that waits for a message fails
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: Operation | None = None
        self._submitted = self._completed = 0
        self._flying: dict[threading.Thread, Operation] = {}  # begun; each thread waits for one
        self._awaited: Operation | None = None  # the one of them that the calling thread waits for
        self._doing: Callable[[], Operation] | None = None  # describes what the calling thread does itself
        self._last: str | Callable[[], Operation] = ""
        self._idle_since = time.monotonic()
        self._broken: CommunicationError | None = None
        self._process, self._forks = os.getpid(), _forks
        if watch is not None:
            watch.start(self.state, self.stop)

    def submit(self, operation: Operation) -> Pending:
        """Queue it behind everything submitted earlier."""
        self.check_process(operation.name)
        if self._broken is not None:
            self._deliver()
            raise CommunicationError(
                f"{operation.name} cannot start: an earlier communication failed ({self._broken})",
                operation=operation.name,
                missing=self._broken.missing,
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._issue, name="phalanx-issuer", daemon=True)
            self._thread.start()
        self._submitted += 1
        self._queue.put(operation)
        return Pending(operation, self)

    def check_process(self, name: str) -> None:
        """Raise in a forked child: it has the parent's connections and memory, but to the others the parent is the rank."""
        if self._forks != _forks:
            raise RuntimeError(
                f"{name}: this communicator belongs to process {self._process}, but this is process {os.getpid()}, a fork of it:"
                " create a communicator after the fork, or start processes with spawn or forkserver"
            )

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one that communicates."""
        return self._forks != _forks

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing has failed: the calling thread may communicate itself."""
        return self._submitted == self._completed and self._broken is None

    def directly(self, work: Callable[[], Any], describe: Callable[[], Operation]) -> Any:
        """Do `work` in the calling thread, while the issuer is `idle`; a failure is explained like any other."""
        if self._forks != _forks:
            self.check_process(describe().name)
        self._doing = describe
        try:
            result = work()
        except (TransportError, SharedMemoryError) as error:
            if not _breaks_the_network(error):
                raise
            self._current = describe()  # stays: it is this rank's answer to alarms
            raise self._fail(self._current, str(error)) from error
        finally:
            self._doing = None
        self._last, self._idle_since = describe, time.monotonic()
        return result

    def got_on(self) -> None:
        """Note progress. The work calls it after each step, so that a long transfer does not count as a hang."""
        current = self._flying.get(threading.current_thread()) or self._current
        if current is not None:
            current.alive = time.monotonic()

    def state(self) -> State:
        """What this rank is doing now."""
        doing = self._doing
        current = self._current or (doing() if doing is not None else None) or self._awaited
        if current is None:
            last = self._last if isinstance(self._last, str) else self._last().name
            return State(operation=last, seconds=time.monotonic() - self._idle_since)
        awaited, posted = self.traffic.report() if self.traffic is not None else ((), ())
        seconds = time.monotonic() - current.alive
        return State(current.comm, current.number, current.name, seconds, awaited=awaited, posted=posted)

    def finish(self, operation: Operation) -> None:
        """Wait until the operation is over; raise if it failed, or as soon as it is known that it cannot succeed."""
        self.check_process(operation.name)
        if operation.landing is not None and not operation.finished.is_set():
            # patience begins here: the peers may compute for as long as this rank did before it waited
            operation.alive = time.monotonic()
            self._awaited = operation
        try:
            while not operation.finished.wait(LOOK):
                self._lose_patience(operation)
        finally:
            self._awaited = None
        error = operation.error
        if error is not None and not _breaks_the_network(error):
            raise error  # of the work itself: a mistake in the call, too little memory
        if error is not None:
            raise self._fail(operation, str(error)) from error

    def settle(self, operation: Operation, seconds: float) -> BaseException | None:
        """Wait for an operation that may fail, and return its error, or a TimeoutError after `seconds`. Raises after an alarm."""
        self.check_process(operation.name)
        until = time.monotonic() + seconds
        self._awaited = operation
        try:
            while not operation.finished.wait(max(0.0, min(LOOK, until - time.monotonic()))):
                if self._broken is not None or (self._watch is not None and self._watch.alarmed.is_set()):
                    raise self._fail(operation, "")
                if time.monotonic() >= until:
                    return TimeoutError(f"{operation.name} did not arrive within {seconds:g} s")
        finally:
            self._awaited = None
        if operation.error is not None and not _breaks_the_network(operation.error):
            raise operation.error
        return operation.error

    def _lose_patience(self, operation: Operation) -> None:
        """Raise if `operation` cannot finish any more."""
        if self._watch is None:
            return
        current = self._current or operation
        still = time.monotonic() - max(operation.alive, current.alive)
        deserted = self._watch.deserted.is_set() and self._watch.store_rank in current.members.values()
        if self._watch.alarmed.is_set() or (deserted and still > AFTERMATH):
            raise self._fail(operation, "")
        if still > self.patience:
            raise self._fail(operation, f"no progress for {self.patience:.1f} s")

    def _fail(self, operation: Operation, cause: str) -> CommunicationError:
        if self._broken is None:
            if self._watch is None:
                self._broken = CommunicationError(f"{operation.name} failed: {cause}", operation=operation.name)
            else:
                current = self._current or operation  # what holds the queue up may be an earlier operation
                mine = State(current.comm, current.number, current.name)
                left = self._timeout - (time.monotonic() - max(operation.alive, current.alive))
                self._broken = self._watch.fail(mine, current.members, cause, left)
            self._cut_off()  # also when this rank's own thread is free: the others notice their broken connections
        self._deliver()
        return self._broken

    def _deliver(self) -> None:
        """The user's code gets the error now, and decides how this rank ends."""
        if self._watch is not None:
            self._watch.delivered.set()

    def _issue(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation.alive = time.monotonic()
            self._current = operation
            try:
                with operation.order:
                    operation.result = operation.work()
            except BaseException as error:  # noqa: BLE001  raised in the thread that waits
                operation.error = error
                if _breaks_the_network(error) and not operation.may_fail:
                    operation.finished.set()
                    return  # `_current` stays: it is this rank's answer to alarms
            self._last, self._idle_since = operation.name, time.monotonic()
            self._current = None
            self._completed += 1
            operation.ended = time.perf_counter()
            if operation.landing is None or (operation.may_fail and operation.error is not None):
                operation.finished.set()
            else:
                self._land_later(operation, operation.landing)
            del operation  # and with it the tensors: the next one may come much later

    def _land_later(self, operation: Operation, landing: Callable[[], None]) -> None:
        """Wait for `operation` in a separate thread: gloo's wait blocks, and there is no other way to learn of a message."""

        def land() -> None:
            try:
                landing()
            except BaseException as error:  # noqa: BLE001  raised in the thread that waits
                operation.error = error
            operation.ended = time.perf_counter()
            del self._flying[thread]
            operation.finished.set()

        thread = threading.Thread(target=land, name="phalanx-landing", daemon=True)
        self._flying[thread] = operation
        thread.start()

    def stop(self) -> None:
        """Finish what is queued or begun, then end the thread. Gives up what does not finish soon. Idempotent."""
        if self._thread is not None and self._broken is None:
            self._queue.put(None)
            if not self._join(1.0):
                self._cut_off()

    def _join(self, seconds: float) -> bool:
        """Whether all threads ended within that time."""
        assert self._thread is not None
        until = time.monotonic() + seconds
        self._thread.join(seconds)
        threads = [self._thread, *self._flying]  # only now: until it ends, the issuing thread starts others
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _cut_off(self) -> None:
        """Get the thread out of the transport: if Python finds it there at exit, the process ends with SIGABRT."""
        if self._cut is not None and self._thread is not None:
            self._cut()
            self._join(1.0)


def _breaks_the_network(error: BaseException) -> bool:
    """Whether messages do not get through any more. Any other error is one of the work itself, and breaks nothing else.

    After a Disagreement or a Refused shared memory is as good as before.
    """
    return isinstance(error, TransportError | SharedMemoryError) and not isinstance(error, Disagreement | Refused)

"""Decides when communication is broken, and makes the error that every wait then raises.

The first failure decides. The watch asks all ranks what they are doing, the error names the missing ones, and no operation can
start after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.comm.activity import Activity
from phalanx.comm.failure import CommunicationError, State, Watch
from phalanx.comm.pending import Operation
from phalanx.comm.transports import TransportError
from phalanx.native.errors import Disagreement, Refused, SharedMemoryError

CUT = 0.5  # seconds after which a thread still waiting on connections that were cut would wait forever
AFTERMATH = 2.0  # seconds without progress after which we no longer expect messages from a rank that has ended


class Breakdown:
    """Whether the communication of this rank is broken. `cut_off` gets its threads out of the transport."""

    def __init__(self, timeout: float, watch: Watch | None, activity: Activity, cut_off: Callable[[], None]) -> None:
        self._timeout, self._watch, self._activity, self._cut_off = timeout, watch, activity, cut_off
        self.patience = timeout - (watch.grace if watch else 0.0)  # less: the verdict must also arrive within the timeout
        self.error: CommunicationError | None = None
        self.cut_since: float | None = None  # when the connections were cut, because the world of an elastic job is over
        self._finding = threading.Lock()  # taken by the thread that waits and the one that watches the device

    def check(self, name: str) -> None:
        """Raise if no operation can start any more."""
        if self.error is not None:
            self._deliver()
            raise CommunicationError(
                f"{name} cannot start: an earlier communication failed ({self.error})",
                operation=name,
                missing=self.error.missing,
            )

    def lose_patience(self, operation: Operation) -> None:
        """Raise if `operation` can no longer finish."""
        why = self.hopeless(operation)
        if why is not None:
            raise self.failed(operation, why)

    def hopeless(self, operation: Operation) -> str | None:
        """Return why `operation` can no longer finish, as far as this rank knows, or None if it may."""
        if self._watch is None:
            # gloo may miss a cut that happens just as a message is posted, and then its wait never ends
            over = self.cut_since is not None and time.monotonic() - self.cut_since > CUT
            return "its connections were cut" if over else None
        current = self._activity.current or operation
        still = time.monotonic() - max(operation.alive, current.alive)
        deserted = self._watch.deserted.is_set() and self._watch.store_rank in current.members.values()
        if self._watch.alarmed.is_set() or (deserted and still > AFTERMATH):
            return ""
        return f"no progress for {self.patience:.1f} s" if still > self.patience else None

    def check_alarm(self, operation: Operation) -> None:
        """Raise if other communication has failed, here or on another rank."""
        if self.error is not None or (self._watch is not None and self._watch.alarmed.is_set()):
            raise self.failed(operation, "")

    def failed(self, operation: Operation, cause: str) -> CommunicationError:
        """Record that `operation` has failed, and return the error to raise in the user's code."""
        error = self.found(operation, cause)
        self._deliver()
        return error

    def found(self, operation: Operation, cause: str) -> CommunicationError:
        """Record that `operation` has failed, find out why, and get all threads out of the transport."""
        with self._finding:
            if self.error is None:
                if self._watch is None:
                    self.error = CommunicationError(f"{operation.name} failed: {cause}", operation=operation.name)
                else:
                    current = self._activity.current or operation  # what holds the queue up may be an earlier operation
                    mine = State(current.comm, current.number, current.name)
                    left = self._timeout - (time.monotonic() - max(operation.alive, current.alive))
                    self.error = self._watch.fail(mine, current.members, cause, left)
                self._cut_off()  # even if this rank's own thread is free, so that the others notice broken connections
            return self.error

    def _deliver(self) -> None:
        """Note that the user's code now gets the error and decides how this rank ends."""
        if self._watch is not None:
            self._watch.delivered.set()


def breaks_the_network(error: BaseException) -> bool:
    """Whether messages no longer get through. Any other error belongs to the operation itself and breaks nothing else.

    After a Disagreement or a Refused, shared memory still works.
    """
    return isinstance(error, TransportError | SharedMemoryError) and not isinstance(error, Disagreement | Refused)

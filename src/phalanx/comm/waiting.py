"""Waits for an operation in the calling thread, until it has ended or cannot succeed any more."""

from __future__ import annotations

import time

from phalanx.comm.activity import Activity
from phalanx.comm.breakdown import Breakdown, breaks_the_network
from phalanx.comm.forks import Owner
from phalanx.comm.pending import Operation

LOOK = 0.1  # seconds between two checks of the clock and the alarm


class Waiting:
    """The object that a `Pending` waits with."""

    def __init__(self, owner: Owner, activity: Activity, breakdown: Breakdown) -> None:
        self._owner, self._activity, self._breakdown = owner, activity, breakdown

    def finish(self, operation: Operation) -> None:
        """Wait until the operation has ended. Raise if it failed, or as soon as it cannot succeed."""
        self._owner.check(operation.name)
        if operation.landing is not None and not operation.finished.is_set():
            # the timeout starts here: the peers may compute for as long as this rank did before it waited
            operation.alive = time.monotonic()
            self._activity.awaited = operation
        try:
            while not operation.finished.wait(LOOK):
                self._breakdown.lose_patience(operation)
        finally:
            self._activity.awaited = None
        error = operation.error
        if error is not None and not breaks_the_network(error):
            raise error  # an error of the operation itself: a wrong argument, too little memory
        if error is not None:
            raise self._breakdown.failed(operation, str(error)) from error
        if operation.on_device:
            self._breakdown.check_alarm(operation)  # it is only queued, and may wait for a dead rank

    def finish_on_device(self, operation: Operation) -> None:
        """Wait until the device has finished a queued operation. Raise if it cannot."""
        while not operation.order.done():
            self._breakdown.check_alarm(operation)  # `queued.py` detects the timeout
            time.sleep(LOOK / 10)

    def settle(self, operation: Operation, seconds: float) -> BaseException | None:
        """Wait for an operation that may fail. Return its error, or a TimeoutError after `seconds`. Raise after an alarm."""
        self._owner.check(operation.name)
        until = time.monotonic() + seconds
        self._activity.awaited = operation
        try:
            while not operation.finished.wait(max(0.0, min(LOOK, until - time.monotonic()))):
                self._breakdown.check_alarm(operation)
                if time.monotonic() >= until:
                    return TimeoutError(f"{operation.name} did not arrive within {seconds:g} s")
        finally:
            self._activity.awaited = None
        if operation.error is not None and not breaks_the_network(operation.error):
            raise operation.error
        return operation.error

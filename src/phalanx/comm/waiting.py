"""How the calling thread waits for an operation: until it is over, or cannot succeed any more."""

from __future__ import annotations

import time

from phalanx.comm.activity import Activity
from phalanx.comm.breakdown import Breakdown, breaks_the_network
from phalanx.comm.forks import Owner
from phalanx.comm.pending import Operation

LOOK = 0.1  # seconds between two looks at the clock and the alarm while waiting


class Waiting:
    """What a `Pending` waits with."""

    def __init__(self, owner: Owner, activity: Activity, breakdown: Breakdown) -> None:
        self._owner, self._activity, self._breakdown = owner, activity, breakdown

    def finish(self, operation: Operation) -> None:
        """Wait until the operation is over; raise if it failed, or as soon as it is known that it cannot succeed."""
        self._owner.check(operation.name)
        if operation.landing is not None and not operation.finished.is_set():
            # patience begins here: the peers may compute for as long as this rank did before it waited
            operation.alive = time.monotonic()
            self._activity.awaited = operation
        try:
            while not operation.finished.wait(LOOK):
                self._breakdown.lose_patience(operation)
        finally:
            self._activity.awaited = None
        error = operation.error
        if error is not None and not breaks_the_network(error):
            raise error  # of the work itself: a mistake in the call, too little memory
        if error is not None:
            raise self._breakdown.failed(operation, str(error)) from error
        if operation.on_device:
            self._breakdown.check_alarm(operation)  # it is only queued, and may wait for a rank that has died

    def finish_on_device(self, operation: Operation) -> None:
        """Wait until the device is done with an operation that is queued; raise if it cannot be."""
        while not operation.order.done():
            self._breakdown.check_alarm(operation)  # `queued.py` loses patience
            time.sleep(LOOK / 10)

    def settle(self, operation: Operation, seconds: float) -> BaseException | None:
        """Wait for an operation that may fail, and return its error, or a TimeoutError after `seconds`. Raises after an alarm."""
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

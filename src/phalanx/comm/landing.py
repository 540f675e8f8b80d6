"""Waits for an operation that was started, while later operations start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from phalanx.comm.activity import Activity
from phalanx.comm.pending import Operation


def land_later(operation: Operation, landing: Callable[[], None], activity: Activity) -> None:
    """Wait for `operation` in a separate thread: gloo's wait blocks, and gloo offers no other way to notice a message."""

    def land() -> None:
        try:
            landing()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            operation.error = error
        operation.ended = time.perf_counter()
        del activity.flying[thread]
        operation.finished.set()

    thread = threading.Thread(target=land, name="phalanx-landing", daemon=True)
    activity.flying[thread] = operation
    thread.start()

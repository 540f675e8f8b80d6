"""Write in the background, one job at a time, in a thread that the process waits for before it exits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx.comm.ending import finish_before_end, process_is_ending, say_last


class Background:
    """Runs one job at a time in its own thread. The process waits for it before it exits, even after an error."""

    def __init__(self, failed: Callable[[BaseException], None] | None = None) -> None:
        self.failed = failed  # called at once, in that thread
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  raised in the training thread, at its next save
                self._error = error
                if process_is_ending():  # no later `save` will raise it
                    say_last(f"the last checkpoint is not complete: {error}")
                elif self.failed is not None:
                    self.failed(error)

        self._thread = threading.Thread(target=run, name="phalanx-checkpoint")
        finish_before_end(self._thread)
        self._thread.start()

    def finish(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job, at most `timeout` seconds, and return its error, once."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self.busy:
                return None
            self._thread = None
        error, self._error = self._error, None
        return error

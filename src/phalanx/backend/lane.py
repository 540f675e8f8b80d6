"""One order of operations per group: a thread that runs them, which the caller replaces where nothing is before it.

To wake another thread takes longer than to sum a few KiB over the ranks of a host.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from phalanx.backend.work import Done, Task, nothing
from phalanx.comm import forks
from phalanx.comm.failure import CommunicationError


class Lane:
    """The operations of one group. `explain` makes of an error what users should read, and whether the group is broken."""

    def __init__(self, name: str, explain: Callable[[str, BaseException], tuple[BaseException, bool]]) -> None:
        self.name, self._explain = name, explain
        self._owner = forks.Owner()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held by the thread that communicates
        self._counting = threading.Lock()
        self._queued = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: BaseException | None = None  # nothing works after it

    def run_here(self, name: str, work: Callable[[], None]) -> bool:
        """Do `work` in this thread if nothing is before it. Returns whether it did; raises if it failed."""
        self._check(name)
        if self._busy():
            return False
        with self._turn:
            if self._busy():  # meanwhile
                return False
            if self.error is not None:
                raise self._cannot_start(name)
            try:
                work()
            except Exception as error:
                explained = self._fail(name, error)
                if explained is error:
                    raise
                raise explained from error
        return True

    def begin_here(
        self, name: str, begin: Callable[[], Callable[[], None] | None], tensors: Sequence[torch.Tensor]
    ) -> Task | Done | None:
        """Call `begin` in this thread, and in the lane's thread what it returns to be done. None if something is before it."""
        self._check(name)
        if self._busy() or not self._turn.acquire(blocking=False):
            return None
        try:
            if self._busy() or self.error is not None:
                return None
            rest = begin()
            # before another thread gets the turn: what is begun must be finished first
            return Done(tensors) if rest is None else self.queue(Task(name, rest, tensors))
        except Exception as error:  # noqa: BLE001  raised by `wait`, as that of a queued one
            failed = Task(name, nothing, tensors)
            failed.end(self._fail(name, error))
            return failed
        finally:
            self._turn.release()

    def queue(self, task: Task) -> Task:
        """Run it in the lane's thread, after all that came before it."""
        self._check(task.name)
        with self._counting:
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"phalanx-{self.name}", daemon=True)
                self._thread.start()
            self._queue.put(task)
        return task

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the group."""
        return self._owner.forked

    def _busy(self) -> bool:
        return self._queued > 0

    def _check(self, name: str) -> None:
        self._owner.check(name)
        if self._closed:
            raise RuntimeError(f"{name}: this process group was destroyed")

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            with self._turn:
                error = task.run(self._fail) if self.error is None else self._cannot_start(task.name)
            with self._counting:
                self._queued -= 1  # before the waiting thread knows: its next call should find the lane free
            task.end(error)
            del task  # and with it the tensors: the next one may come much later

    def _fail(self, name: str, error: BaseException) -> BaseException:
        explained, broken = self._explain(name, error)
        if broken:
            self.error = explained
        return explained

    def _cannot_start(self, name: str) -> CommunicationError:
        words = f"{name} cannot start: an earlier communication failed ({self.error})"
        return CommunicationError(words, operation=name, missing=getattr(self.error, "missing", ()))

    def close(self, seconds: float, abort: Callable[[], None]) -> None:
        """Finish what is queued within `seconds`, or `abort` it; then end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        thread = self._thread
        if thread is None or self.forked:
            return
        self._queue.put(None)
        if thread is threading.current_thread():  # it dropped the last reference to the group
            return
        thread.join(seconds)
        if thread.is_alive():
            abort()
            thread.join(seconds)

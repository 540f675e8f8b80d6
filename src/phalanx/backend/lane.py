"""Run the operations of a group in one order, in a thread of the lane or in a caller that would only wait.

Waking another thread takes longer than summing a few KiB over the ranks of a host. So the thread that needs a result runs
everything queued before it, and then the operation itself, unless the lane's thread has already started.

An operation can also be held (`holding.py`): the lane's thread skips it until its result is needed or PATIENCE has passed.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from phalanx.backend.work import Done, Task, nothing
from phalanx.comm import forks
from phalanx.comm.failure import CommunicationError

PATIENCE = 2.0  # seconds before the lane's thread runs a held operation anyway


class Call(enum.Enum):
    """A request to the lane's thread."""

    RUN = enum.auto()  # what is queued
    LOOK = enum.auto()  # for held operations, and wait for PATIENCE
    END = enum.auto()  # after running what is queued


class Lane:
    """The operations of one group. `explain` turns an error into the one to show, and says whether the group is broken."""

    def __init__(self, name: str, explain: Callable[[str, BaseException], tuple[BaseException, bool]]) -> None:
        self.name, self._explain = name, explain
        self._owner = forks.Owner()
        self._turn = threading.Lock()  # held while taking and running a task
        self._changing = threading.Lock()  # guards the fields below
        self._tasks: deque[Task] = deque()  # in order, without the running one
        self._taken = 0  # number of tasks that have been taken to run
        self._watches = False  # whether the lane's thread checks held operations on its own
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.waited_in_vain = False  # a held operation was not needed within PATIENCE
        self.error: BaseException | None = None  # once set, every operation fails

    # ---- in the thread that calls ------------------------------------------------------------------------------------------

    def run_here(self, name: str, work: Callable[[], None]) -> None:
        """Do `work` in this thread, after everything queued before it. Raises if it failed."""
        if self._closed or self._owner.forks != forks.count:  # a call of `_check` takes as long as the lock
            self._check(name)
        while True:
            if self._tasks:
                self.run_until()
            with self._turn:
                if self._tasks:  # queued in the meantime
                    continue
                if self.error is not None:
                    raise self._cannot_start(name)
                try:
                    work()
                except Exception as error:
                    explained = self._fail(name, error)
                    if explained is error:
                        raise
                    raise explained from error
                return

    def begin_here(
        self, name: str, begin: Callable[[], Callable[[], None] | None], tensors: Sequence[torch.Tensor]
    ) -> Task | Done | None:
        """Call `begin` here, and queue what it returns, if anything. Returns None if other operations come first."""
        self._check(name)
        if self._tasks or not self._turn.acquire(blocking=False):
            return None
        try:
            if self._tasks or self.error is not None:
                return None
            rest = begin()
            # queue before releasing the turn: what has begun must finish first
            return Done(tensors) if rest is None else self.queue(Task(name, rest, tensors, self))
        except Exception as error:  # noqa: BLE001  raised by `wait`, as that of a queued one
            failed = Task(name, nothing, tensors, self)
            failed.end(self._fail(name, error))
            return failed
        finally:
            self._turn.release()

    def queue(self, task: Task) -> Task:
        """Run `task` after everything before it, in the lane's thread or in the first thread that waits for it."""
        self._add(task)
        if threading.current_thread() is self._thread:  # a task's callback may wait for this one
            self.run_until()
        else:
            self._calls.put(Call.RUN)
        return task

    def hold(self, task: Task) -> Task:
        """Like `queue`, but the lane's thread starts it only after PATIENCE."""
        if not self._add(task):
            self._calls.put(Call.LOOK)
        return task

    def _add(self, task: Task) -> bool:
        """Append the task. Returns whether the lane's thread is watching."""
        self._check(task.name)
        with self._changing:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"phalanx-{self.name}", daemon=True)
                self._thread.start()
            return self._watches

    def release(self) -> None:
        """Let the lane's thread run the held operations."""
        self._calls.put(Call.RUN)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the group."""
        return self._owner.forked

    def _check(self, name: str) -> None:
        self._owner.check(name)
        if self._closed:
            raise RuntimeError(f"{name}: this process group was destroyed")

    # ---- in any thread -----------------------------------------------------------------------------------------------------

    def run_until(self, last: Task | None = None) -> None:
        """Run queued tasks here, up to `last` or all. Another thread may still be running `last` when this returns."""
        while self._tasks and not (last is not None and last.is_completed()):
            with self._turn:  # taken before the task is, so that tasks run in order in any thread
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._taken += 1
                error = task.run(self._fail) if self.error is None else self._cannot_start(task.name)
            task.end(error)
            if isinstance(error, KeyboardInterrupt):  # raised in this thread
                raise error
            if task is last:
                return

    def _fail(self, name: str, error: BaseException) -> BaseException:
        explained, broken = self._explain(name, error)
        if broken:
            self.error = explained
        return explained

    def _cannot_start(self, name: str) -> CommunicationError:
        words = f"{name} cannot start: an earlier communication failed ({self.error})"
        return CommunicationError(words, operation=name, missing=getattr(self.error, "missing", ()))

    # ---- in the lane's thread ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        call = Call.LOOK
        while call is not Call.END:
            call = self._next_call()
            if call is not Call.LOOK:
                self.run_until()

    def _next_call(self) -> Call:
        """Wait for a call, with a timeout if tasks are held."""
        with self._changing:
            taken, self._watches = self._taken, bool(self._tasks)
        try:
            return self._calls.get(timeout=PATIENCE if self._watches else None)
        except queue.Empty:
            if self._taken != taken or not self._tasks:
                return Call.LOOK
            self.waited_in_vain = True
            return Call.RUN

    def close(self, seconds: float, abort: Callable[[], None]) -> None:
        """Finish what is queued within `seconds`, or `abort` it; then end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        thread = self._thread
        if thread is None or self.forked:
            return
        self._calls.put(Call.END)
        if thread is threading.current_thread():  # it dropped the last reference to the group
            return
        thread.join(seconds)
        if thread.is_alive():
            abort()
            thread.join(seconds)

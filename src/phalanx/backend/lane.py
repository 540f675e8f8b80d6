"""One order of operations per group: a thread that runs them, which the caller replaces wherever it would only wait.

To wake another thread takes longer than to sum a few KiB over the ranks of a host. So the thread that needs a result runs what
comes before it, and then the operation itself, unless the lane's thread has begun already.

An operation can also be held (`holding.py`): the lane's thread leaves it alone until somebody wants it, or PATIENCE has passed.
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

PATIENCE = 2.0  # seconds that the lane's thread leaves a held operation alone


class Call(enum.Enum):
    """What the lane's thread should do."""

    RUN = enum.auto()  # what is there
    LOOK = enum.auto()  # whether something is held, and be patient with it
    END = enum.auto()  # after what is there


class Lane:
    """The operations of one group. `explain` makes of an error what users should read, and whether the group is broken."""

    def __init__(self, name: str, explain: Callable[[str, BaseException], tuple[BaseException, bool]]) -> None:
        self.name, self._explain = name, explain
        self._owner = forks.Owner()
        self._turn = threading.Lock()  # held by the thread that communicates, and by no other that takes a task
        self._changing = threading.Lock()  # of what follows
        self._tasks: deque[Task] = deque()  # in order, without the one that is under way
        self._taken = 0  # tasks that a thread has taken to run them
        self._watches = False  # whether the lane's thread looks at held operations by itself
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.waited_in_vain = False  # a held operation was not wanted within PATIENCE
        self.error: BaseException | None = None  # nothing works after it

    # ---- in the thread that calls ------------------------------------------------------------------------------------------

    def run_here(self, name: str, work: Callable[[], None]) -> None:
        """Do `work` in this thread, after all that comes before it. Raises if it failed."""
        self._check(name)
        while True:
            if self._tasks:
                self.run_until()
            with self._turn:
                if self._tasks:  # meanwhile
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
        """Call `begin` in this thread, and in the lane's thread what it returns to be done. None if something is before it."""
        self._check(name)
        if self._tasks or not self._turn.acquire(blocking=False):
            return None
        try:
            if self._tasks or self.error is not None:
                return None
            rest = begin()
            # before another thread gets the turn: what is begun must be finished first
            return Done(tensors) if rest is None else self.queue(Task(name, rest, tensors, self))
        except Exception as error:  # noqa: BLE001  raised by `wait`, as that of a queued one
            failed = Task(name, nothing, tensors, self)
            failed.end(self._fail(name, error))
            return failed
        finally:
            self._turn.release()

    def queue(self, task: Task) -> Task:
        """Run it in the lane's thread, after all that came before it, or in the thread that waits for it first."""
        self._add(task)
        if threading.current_thread() is self._thread:  # a callback of another task, which may wait for this one
            self.run_until()
        else:
            self._calls.put(Call.RUN)
        return task

    def hold(self, task: Task) -> Task:
        """As `queue`, but the lane's thread does not begin with it before PATIENCE has passed."""
        if not self._add(task):
            self._calls.put(Call.LOOK)
        return task

    def _add(self, task: Task) -> bool:
        """Whether the thread watches."""
        self._check(task.name)
        with self._changing:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"phalanx-{self.name}", daemon=True)
                self._thread.start()
            return self._watches

    def release(self) -> None:
        """Let the lane's thread run what is held."""
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
        """Run in this thread what waits, up to `last`, or all of it. Another thread may still run `last` when this returns."""
        while self._tasks and not (last is not None and last.is_completed()):
            with self._turn:  # before the task is taken, so that all run in their order, in whatever thread
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._taken += 1
                error = task.run(self._fail) if self.error is None else self._cannot_start(task.name)
            task.end(error)
            if isinstance(error, KeyboardInterrupt):  # of this thread
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
        """Wait for one, but only for so long if tasks are held."""
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

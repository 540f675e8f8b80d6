"""Host threads take turns, in an order that the seed decides, on a clock that only moves when they wait.

    rank 0            rank 0's issuer      rank 1             device queues
    runs ...
    blocks (Event) -> runs ...
                      blocks ------------> runs ...
                                           blocks ----------> some kernels run
    <------------------------------------------------------- what rank 0 waits for has come: it runs again

One thread runs at a time. It hands over where it blocks, and now and then where it could continue. If no thread can run and no
kernel is ready, the clock jumps to the next deadline. If there is no deadline either, the program is stuck for ever, and every
thread gets a `DeadlockError` that lists what each of them waits for. So a timeout of a minute costs nothing, and a seed names a
run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

FAR = 86_400.0  # seconds: a deadline beyond a day is none
PATIENCE = 1_000.0  # seconds on our clock that a host may wait for its device before we call it a deadlock
REAL = 60.0  # seconds on the real clock without a change of threads, after which the one that runs is stuck in something real


class DeadlockError(RuntimeError):
    """Nothing can move any more; the text lists who waits for what."""


class Over(SystemExit):
    """Ends a thread of a simulated process that was killed, or is left over at the end of the simulation."""


class SimThread:
    """A host thread that takes turns with the others."""

    def __init__(self, name: str, process: Any) -> None:
        self.name, self.process = name, process
        self.gate = threading.Lock()  # locked while it is not this thread's turn
        self.gate.acquire()
        self.ready: Callable[[], bool] | None = None  # None: it can continue at any time
        self.deadline: float | None = None
        self.why = ""
        self.since = 0.0
        self.on_device = False
        self.error: BaseException | None = None  # raised where it waits
        self.finished = False

    def can_run(self, now: float) -> bool:
        return (
            self.error is not None or self.ready is None or (self.deadline is not None and self.deadline <= now) or self.ready()
        )


here = threading.local()  # .thread: the SimThread of the calling thread


def me() -> SimThread | None:
    """The simulated thread that calls, None for a real one."""
    return getattr(here, "thread", None)


class Conductor:
    """Who runs next. `step` runs some kernels and returns whether there were any; `report` describes the device queues.

    `switch` is called when another process gets its turn.
    """

    def __init__(
        self, seed: int, step: Callable[[], bool], report: Callable[[], str], switch: Callable[[Any, Any], None]
    ) -> None:
        self.random = random.Random(seed)
        self.now = 1_000.0
        self.threads: list[SimThread] = []
        self._step, self._report, self._switch = step, report, switch
        self._eager = self.random.choice((0.02, 0.3, 0.8))  # how much rather the device moves than a thread that could
        self._restless = self.random.choice((0.0, 0.02, 0.2))  # how often a thread hands over where it could continue
        self._turns = 0  # so far
        self.over = False

    def enter(self, name: str, process: Any) -> SimThread:
        """The calling thread takes turns from now on, and has the baton."""
        here.thread = thread = SimThread(name, process)
        self.threads.append(thread)
        return thread

    def leave(self) -> None:
        """The calling thread ends; another one continues."""
        thread = here.thread
        thread.finished = True
        self.threads.remove(thread)
        here.thread = None
        if any(not other.finished for other in self.threads):
            self._hand_over(thread)

    def start(self, name: str, process: Any, run: Callable[[], object]) -> SimThread:
        """A new thread; it begins when its turn comes."""
        thread = SimThread(name, process)
        work = [run]  # let go of it before the next thread runs: tensors die here, and not beside that one

        def body() -> None:
            thread.gate.acquire()
            here.thread = thread
            try:
                if thread.error is None:
                    work.pop()()
            except Over:
                pass
            finally:
                work.clear()
                self.leave()

        del run
        self.threads.append(thread)
        threading.Thread(target=body, name=name, daemon=True).start()
        return thread

    # ---- waiting ---------------------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], seconds: float | None = None, why: str = "", *, on_device: bool = False) -> bool:
        """Until `ready()`, or for `seconds` on our clock; returns `ready()`."""
        thread = me()
        assert thread is not None, "only simulated threads can wait for simulated things"
        self._check(thread)
        if not ready():
            thread.ready, thread.why, thread.since, thread.on_device = ready, why, self.now, on_device
            thread.deadline = None if seconds is None or seconds > FAR else self.now + max(0.0, seconds)
            self._hand_over(thread)
            thread.ready, thread.deadline, thread.on_device = None, None, False
            self._check(thread)
        return ready()

    def maybe_yield(self) -> None:
        """Another thread may run here, if the seed says so."""
        thread = me()
        if thread is not None and self._restless and len(self.threads) > 1 and self.random.random() < self._restless:
            self._hand_over(thread)
            self._check(thread)

    def _check(self, thread: SimThread) -> None:
        if thread.error is not None:
            error = thread.error
            if not isinstance(error, Over):
                thread.error = None
            raise error

    def _hand_over(self, thread: SimThread) -> None:
        """Let the next one run; returns when it is this thread's turn again, at once if it has ended."""
        self._turns += 1
        chosen = self._choose()
        if chosen is None or chosen is thread:
            return
        if chosen.process is not thread.process:
            self._switch(thread.process, chosen.process)
        chosen.gate.release()
        seen = -1
        while not thread.finished and not thread.gate.acquire(timeout=REAL):
            if seen == self._turns:
                raise DeadlockError(f"{thread.name} never got its turn: a thread blocks in something that is not simulated")
            seen = self._turns

    def _choose(self) -> SimThread | None:
        while True:
            able = [t for t in self.threads if t.can_run(self.now)]
            if able and not (self.random.random() < self._eager and self._step()):
                return able[0] if len(able) == 1 else self.random.choice(able)
            if able or self._step():
                for _ in range(self.random.choice((0, 0, 2, 10))):
                    self._step()
                continue
            if not self.threads:
                return None
            deadlines = [t.deadline for t in self.threads if t.deadline is not None]
            if deadlines:
                self.now = max(self.now, min(deadlines))
                self._give_up_on_the_device()
            else:
                self._stuck(list(self.threads))

    def _give_up_on_the_device(self) -> None:
        late = [t for t in self.threads if t.on_device and t.error is None and self.now - t.since > PATIENCE]
        if late:
            self._stuck(late)

    def _stuck(self, threads: list[SimThread]) -> None:
        waits = "\n".join(f"  {t.name} waits for {t.why}" for t in self.threads if t.ready is not None)
        for thread in threads:
            thread.error = DeadlockError(f"deadlock: nothing can move\n{waits}\n{self._report()}")

    def end(self, process: Any = None) -> None:
        """End all threads but the calling one: those of a killed `process`, or everything that is left over."""
        mine = me()
        for thread in self.threads:
            if thread is not mine and (process is None or thread.process is process):
                thread.error = Over()
        if process is None and mine is not None:
            self.over = True
            self.wait(lambda: self.threads == [mine], None, "the end of all threads")


class Clock:
    """The module `time` as the product sees it."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        self._conductor.now += 1e-6
        return self._conductor.now

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        self._conductor.wait(lambda: False, seconds, f"{seconds:g} s to pass")

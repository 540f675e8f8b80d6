"""Failure detection: when something goes wrong on one rank, every rank learns what happened, and where.

gloo and NCCL notice a broken connection or a timeout, but they name only an address, and sometimes the wrong one. So each process
has a `Watch`: a thread that blocks on a key of the job's store, independently of the training thread. The rank that notices a
failure raises the alarm, and every live process answers with its state. A rank that does not answer is dead, stopped or cut off;
a rank in another operation is late or lost. The first rank to raise the alarm collects and publishes the answers, so the cost is
O(world). `explain` (verdict.py) turns the answers into the message. ending.py describes how a process ends.

    rank 0                         store                    rank 1 (computing)         rank 2 (killed)
    all_reduce #17 breaks
    alarm ------------------------>  ------------------------> state: in user code
    collects for `grace` seconds <-- state of 0, state of 1                              no state
    verdict ---------------------->  ------------------------> raises at its next call
    raises CommunicationError: all_reduce #17 ...: rank 2 does not answer
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from phalanx.comm.bounded import bounded
from phalanx.comm.processes import ProcessId
from phalanx.comm.store import FOR_EVER, Store, clear
from phalanx.comm.verdict import Call, CommunicationError, State, Verdict, explain

__all__ = ["CommunicationError", "State", "Watch"]

T = TypeVar("T")

LAST_WORDS = 1.5  # seconds that a rank which raised keeps the store up, so that the others can read the reason


class Watch:
    """Waits for alarms, answers them and raises them. There is one per process, or per thread that plays a rank.

    `store` serves the threads that raise alarms. `listening`, a second connection, serves the thread that waits for them. The
    rank that holds the store outlives the others: when it is done it announces that, and stays until no rank needs the store.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        listening: Store,
        *,
        timeout: float,
        store_rank: int | None,
        end: Callable[[Watch, str], None] | None = None,
    ) -> None:
        self.rank, self.world, self.store_rank = rank, world, store_rank
        self.grace = min(timeout / 3, 4.0)  # seconds to raise an alarm, collect the answers and decide
        self.alarmed = threading.Event()
        self.interrupts: list[Callable[[], None]] = []  # called on an alarm, to end waits that cannot succeed
        self.delivered = threading.Event()  # the user's code has the error, and decides what happens next
        self.deserted = threading.Event()  # the rank that holds the store is done, and joins no more operations
        self._timeout = timeout
        self._store, self._listening = store, listening
        self._end = end  # ends this process after another rank raised; None for ranks that are threads
        self._state: Callable[[], State] = State
        self._end_work: Callable[[], None] = lambda: None
        self._raised = ""
        self._echoes = False  # this rank raised only because communication had failed
        self._verdict: Verdict | None = None
        self._quiet = False
        self._store_lost = False
        self._hung_up = False  # this rank needs nothing more from the store
        self.process = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="phalanx-watch", daemon=True)
        store.set(f"process/{rank}", ProcessId.mine().to_text())
        # the process that holds the store, if it is a rank
        self._holder = None if store_rank is None else ProcessId.parse(store.get(f"process/{store_rank}").decode())

    def start(self, state: Callable[[], State], end_work: Callable[[], None] = lambda: None) -> None:
        """Start to answer. `state` returns what this rank is doing now, `end_work` finishes its operations."""
        self._state, self._end_work = state, end_work
        self._thread.start()

    def fail(self, mine: State, members: Mapping[int, int], cause: str = "", seconds: float = 0.0) -> CommunicationError:
        """Return the error to raise on this rank after an operation broke or timed out, or after an alarm.

        The store counts as lost if it does not answer within `seconds`, the time that the operation has left, or `grace`.
        """
        return explain(mine, members, self._ask(seconds), cause)

    def raised(self, error: BaseException) -> bool:
        """Report that this rank ends with an uncaught exception. End the others too, even if they would compute for hours.

        Return whether it is the first to do so, or cannot know.
        """
        self._echoes = isinstance(error, CommunicationError) and self._verdict is not None
        self._raised = traceback.format_exception_only(error)[-1].strip()[:300]
        first = None
        if not self._unreachable():
            first = None if self._holder_is_lost() else _within(self.grace, self._end_others)
            self._store_lost = first is None
        if self._verdict is None:
            self._verdict = self._presumed()
        return first is not False and not self._hung_up

    @property
    def leaving(self) -> bool:
        """Whether this rank is ending, after its own exception or because it is done."""
        return self._quiet or bool(self._raised)

    def stop(self) -> None:
        """Announce that this rank is done. Idempotent. Starts no thread, because Python 3.12 allows none at exit."""
        if self._quiet or os.getpid() != self.process:  # a forked child must not use its parent's connections
            return
        if not self._raised:  # no rank waits for the queued operations of a rank that raised
            self._end_work()
        self._quiet = True
        if self._unreachable():
            return
        with contextlib.suppress(Exception):
            self._store.multi_set([f"state/{self.rank}"], [self._answer()])
            if self.store_rank == self.rank:
                others = self._others()
                self._store.multi_set([f"alarm/{rank}" for rank in others], [Call.DESERTED.value] * len(others))
            self._store.multi_set([f"{key}/{self.rank}" for key in ("alarm", "again", "ended")], [Call.STOP.value] * 3)
            self._thread.join(0.5)
            self._store.set(f"gone/{self.rank}", "")
        if not self._thread.is_alive():
            self._listening = self._store  # drop the second connection, so that it closes here and at the store

    def is_over(self) -> bool:
        """After `stop`: whether no rank needs the communicator's keys any more. If so, rank 0 removes them."""
        with contextlib.suppress(Exception):  # the store may be gone
            if self.rank == 0 and os.getpid() == self.process and not self._unreachable():
                if not self._store.check([f"gone/{rank}" for rank in range(self.world)]):
                    return False
                clear(self._store)
        return True

    def linger(self) -> None:
        """Keep this process, and so the store, until no other rank needs it: at most for the timeout, less after a failure."""
        if self.store_rank != self.rank or os.getpid() != self.process:
            return
        deadline = time.monotonic() + (LAST_WORDS if self._raised else self.grace if self._verdict else self._timeout)
        answered = (
            range(self.world) if self._verdict is None else [r for r, state in self._verdict.states.items() if not state.fate]
        )
        pending = set(answered) - {self.rank}
        with contextlib.suppress(Exception):
            while pending and time.monotonic() < deadline:
                pending = {rank for rank in pending if not self._store.check([f"gone/{rank}"]) and not self._lost(rank)}
                time.sleep(0.02 if len(pending) < 100 else 0.2)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def _unreachable(self) -> bool:
        """Whether to avoid the store. A client of a stopped server blocks, and that of a dead one makes torch print."""
        return self._hung_up or self._store_lost or (self._verdict is not None and self._verdict.store_lost is not None)

    def _end_others(self) -> bool:
        """Publish the reason, and return whether this rank was the first to do so.

        This rank knows the reason without asking, so it writes the verdict before it raises the alarm.
        """
        others = self._others()
        first = self._store.compare_set("alarm", "", str(self.rank)).decode() == str(self.rank)
        self._store.set(f"state/{self.rank}", self._answer())
        if first:
            self._verdict = self._presumed()
            self._store.set("verdict", self._verdict.to_json())
            if others:
                self._store.multi_set(
                    [f"{key}/{rank}" for key in ("alarm", "again") for rank in others], [Call.ALARM.value] * 2 * len(others)
                )
        first = self._store.compare_set("ended", "", str(self.rank)).decode() == str(self.rank)
        if first and others:
            self._store.multi_set([f"ended/{rank}" for rank in others], [f"rank {self.rank} raised {self._raised}"] * len(others))
        return first

    def _answer(self) -> str:
        return self._mine().to_json()

    def _mine(self) -> State:
        # a rank that raised or left because the job had failed is not the cause, even if another rank asks later
        left = self._quiet and self._verdict is None
        return replace(self._state(), raised="" if self._echoes else self._raised, left=left)

    # ---- listening ---------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            why = self._hear()
        except Exception:  # noqa: BLE001  the store is gone: a waiting rank gets a broken operation or a timeout
            self._store_lost = True
            return
        if why and self._end is not None and not self.leaving:
            self._end(self, why)

    def _hear(self) -> str:
        """Wait for an alarm and answer it. Return why this process must end, or "" if it is done before that."""
        self._listening.wait([f"alarm/{self.rank}"], FOR_EVER)
        if self._listening.get(f"alarm/{self.rank}").decode() == Call.DESERTED.value:
            self.deserted.set()
            self._listening.wait([f"again/{self.rank}"], FOR_EVER)
        if self._quiet:
            return ""
        self._listening.set(f"state/{self.rank}", self._answer())
        self.alarmed.set()
        for interrupt in self.interrupts:
            interrupt()
        with contextlib.suppress(RuntimeError):  # the rank that writes it may have died
            self._listening.wait(["verdict"], datetime.timedelta(seconds=self.grace))
            self._verdict = Verdict.from_json(self._listening.get("verdict").decode())
        self._listening.wait([f"ended/{self.rank}"], FOR_EVER)
        why = self._listening.get(f"ended/{self.rank}").decode()
        if not self._quiet:
            self._hung_up = True
            self._listening.set(f"gone/{self.rank}", "")
        return why

    # ---- asking ------------------------------------------------------------------------------------------------------------

    def _ask(self, seconds: float = 0.0) -> Verdict:
        """Raise the alarm, or join one. Takes at most `grace` or `seconds`, even if the store hangs."""
        if self._verdict is None:
            hopeless = self._unreachable() or self._holder_is_lost()
            answer = None if hopeless else _within(0.9 * max(self.grace, seconds), self._collect)
            self._verdict = answer or self._verdict or self._presumed()
        return self._verdict

    def _presumed(self) -> Verdict:
        """Return what is known without asking: this rank's own state. Assume that the others are fine, except the store's holder.

        The holder counts as silent, because the store does not answer.
        """
        if self._raised:
            return Verdict({rank: State() for rank in self._others()} | {self.rank: self._mine()}, world=self.world)
        mine = self._state()
        states = {rank: mine for rank in range(self.world) if rank != self.store_rank}
        if self._holder is not None and self.store_rank is not None and (fate := self._holder.fate):
            states[self.store_rank] = State(fate=fate, pid=self._holder.pid)
        return Verdict(states, self.store_rank, self.world)

    def _collect(self) -> Verdict:
        first = self._store.compare_set("alarm", "", str(self.rank)).decode() == str(self.rank)
        self._store.set(f"state/{self.rank}", self._answer())
        if not first:
            with contextlib.suppress(Exception):  # the rank that writes it may have died: then ask again
                self._store.wait(["verdict"], datetime.timedelta(seconds=0.78 * self.grace))
                return Verdict.from_json(self._store.get("verdict").decode())
        deadline = time.monotonic() + (0.7 if first else 0.1) * self.grace
        others = self._others()
        if others:
            self._store.multi_set(
                [f"{key}/{rank}" for key in ("alarm", "again") for rank in others], [Call.ALARM.value] * 2 * len(others)
            )
        pending = set(range(self.world))
        lost: dict[int, State] = {}
        while pending and time.monotonic() < deadline:
            pending = {rank for rank in pending if not self._store.check([f"state/{rank}"])}
            lost = {rank: state for rank in pending if (state := self._lost(rank))}
            if pending == lost.keys():
                break  # none of them will ever answer
            time.sleep(0.02)
        states = dict(lost)
        for rank in set(range(self.world)) - pending:
            states[rank] = State.from_json(self._store.get(f"state/{rank}"))
        verdict = Verdict(states, world=self.world)
        self._store.set("verdict", verdict.to_json())
        return verdict

    def _lost(self, rank: int) -> State | None:
        """The state of a rank that will never answer, as far as the kernel of this host knows. None for all others."""
        key = f"process/{rank}"
        if not self._store.check([key]):
            return None
        process = ProcessId.parse(self._store.get(key).decode())
        fate = process.fate
        return None if fate is None else State(fate=fate, pid=process.pid)

    def _holder_is_lost(self) -> bool:
        return self._holder is not None and self._holder.fate is not None


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Call `ask`. Return None if it fails or takes longer: a store on a stopped host blocks its clients."""
    try:
        return bounded(seconds, ask, "phalanx-ask")
    except Exception:  # noqa: BLE001  the store may be gone, or a stranger may have written to it
        return None

"""`phalanx run`: the agent of one host. It starts ranks, replaces those that die, and meets the agents of the other hosts.

    the agent that holds the meeting point            rank, on any host             agent of another host
    opens a port, serves the store                                                  finds the job there
    starts ranks, with the secret in their environment --> connect, sign      <---- starts ranks
    decides who is a member                           <--- signs of life, reports
    a rank dies: its agent reports it, a new epoch begins without it, and its agent starts another one if --replace allows

On one host there is one agent. No agent is a rank, so every rank may die, and every host but the one with the meeting point. If
that one is lost, all ranks stop: they raise a CommunicationError at their next communication, and a script can then save a
checkpoint. The other agents wait for the meeting point to come back, and start again with new ranks. An agent whose host was
cut off from the meeting point does the same, while the others continue without it. If all ranks fall silent with their hosts, no
process has the training state any more: the agent with the meeting point opens another one, and waits for agents with new ranks.
"""

from __future__ import annotations

import gc
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.comm.addresses import own_address
from phalanx.comm.bounded import bounded
from phalanx.comm.elastic.agents import AgentKeys, Card, Order
from phalanx.comm.elastic.board import Board, MeetingPoint, wait_until
from phalanx.comm.elastic.children import Children, environment
from phalanx.comm.elastic.coordinator import LOST
from phalanx.comm.elastic.door import Door, enter
from phalanx.comm.elastic.echo import Echo
from phalanx.comm.elastic.guard import FENCED
from phalanx.comm.elastic.head import GRACE, Head
from phalanx.comm.elastic.line import Line
from phalanx.comm.elastic.links import FORGOTTEN
from phalanx.comm.elastic.quorum import Rule
from phalanx.comm.elastic.spares import Spares
from phalanx.comm.ending import say_last
from phalanx.comm.launch import SECRET
from phalanx.comm.start import handling

LOOK = 0.02  # seconds between two looks at the ranks
NO_MEETING = 69  # the exit code of an agent that cannot reach the meeting point: EX_UNAVAILABLE of sysexits.h
WAIT = 300.0  # seconds to wait for other hosts, by default
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an agent comes back, after it was cut off


@dataclass
class Supervisor:
    """Runs `python ARGUMENTS` on `count` ranks of this host, and starts at most `budget` more for those that die."""

    count: int
    arguments: Sequence[str]
    budget: int = 0
    door: Door = field(default_factory=Door)
    wait: float = WAIT
    announces: bool = True  # a line for every change of membership
    quorum: Rule = "majority"
    spares: int = 0  # processes that wait to replace a rank; each runs `python SPARE_COMMAND` until then
    spare_command: Sequence[str] = ()
    name: str = field(default_factory=lambda: secrets.token_hex(4))  # of this process, in the cards of all jobs it joins

    def run(self) -> int:
        """Run until the job is over. Returns its exit code."""
        secret = secrets.token_hex(32) if self.door.one_host else os.environ[SECRET]
        os.environ[SECRET] = secret
        heard: list[int] = []
        pause = 0.0
        with handling(heard):
            while True:
                try:
                    point, store = enter(self.door, secret, self.wait, lambda: bool(heard))
                except TimeoutError as error:
                    say_last(str(error))
                    return NO_MEETING
                except InterruptedError:
                    return 128 + heard[0]
                env = environment(secret)
                children = Children(self.arguments, env, spares=Spares(self.spare_command, env, self.spares))
                host = _Host(self, point, store, children, heard)
                try:
                    code = host.run()
                finally:
                    host.children.kill()
                if code is not None:
                    return code
                if store is None and not heard:
                    say_last(f"returns to {self.door} with new ranks, if it answers within {self.wait:g} s")
                    pause = pause_after(pause, host.inside)
                    wait_until(lambda: heard or None, pause, LOOK)  # `time.sleep(pause)` would continue after Ctrl-C
                if heard:
                    return 128 + heard[0]
                del host, store  # the last references, but for cycles, to the store: its port is free for the next job
                gc.collect()


def pause_after(last: float, inside: float) -> float:
    """Seconds that an agent waits before it comes back. `inside`: how long it was in the job. `last`: its pause before that.

    Twice as long each time, so that an agent that fails at once does not try all the time. After a calm time it begins anew.
    """
    calm = inside > FORGOTTEN + LOST  # it takes LOST seconds to notice the cut
    return FIRST_PAUSE if calm else min(max(2 * last, FIRST_PAUSE), LONGEST_PAUSE)


class _Host:
    """This host in one job, until the job is over or cannot be reached any more."""

    def __init__(self, order: Supervisor, point: MeetingPoint, store: Any, children: Children, heard: list[int]) -> None:
        self._order, self._point, self._store, self.children, self._heard = order, point, store, children, heard
        self._sent = 0  # signals that were passed on
        self._echo: Echo | None = None
        self._out: set[int] = set()  # ranks that the job has given up
        self._wanted = 0  # ranks that this agent has ever wanted; only its main thread changes it
        self._told = 0  # those that the head knows of; only the thread of the line changes it
        self._begun = False  # whether this agent knows that the first world was formed
        self._early: list[int] = []  # ranks that ended before it knew
        self._granted: queue.SimpleQueue[int] = queue.SimpleQueue()  # numbers for them, from the thread of the line
        self._until = float("inf")
        self._ending: int | None = None  # the exit code of this agent, if a signal ends it
        self._came = time.monotonic()
        self.inside = 0.0  # seconds in the job, without those in which its ranks stopped

    def run(self) -> int | None:
        """The exit code of the job; None if this agent has to begin again, with new ranks."""
        store, self._store = self._store, None  # threads may keep this object longer than the job needs the store
        board = Board(self._point, 60.0, store)
        head = None
        if store is not None:
            head = Head(board, self._order.door.hosts, self._order.wait, say_last, self._order.quorum)
            if not self._order.announces:
                head.coordinator.say = _say_nothing
        keys = AgentKeys(board.another() if head else board)
        try:
            self._agent = bounded(10.0, lambda: keys.introduce(self._card()), "phalanx-meeting")
        except (RuntimeError, TimeoutError):
            return None
        if head is not None:
            head.own = self._agent
        self._line = Line(keys, self._agent, self._to_come, far=head is None)
        for number in range(self._order.count):
            self._want(self._agent * self._order.count + number)
        try:
            return self._watch(head)
        finally:
            self._line.close()
            if self._echo is not None:
                self._echo.close()

    def _card(self) -> Card:
        name, tag, process = socket.gethostname(), secrets.token_hex(4), self._order.name
        if self._order.door.one_host:
            return Card(name, ranks=self._order.count, tag=tag, process=process)
        address = own_address("", self._point.host)
        self._echo = Echo(address, os.environ[SECRET], self._point.token)
        return Card(name, address, self._echo.port, self._order.count, tag, process)

    def _probe(self, order: Order) -> None:
        """Ask the other agents, which takes a while, and tell the head which of them do not answer."""
        places = {agent: (address, port) for agent, address, port in order.places if agent != self._agent}
        missing = self._echo.unreachable(places) if self._echo is not None else tuple(places)
        self._line.post(lambda keys: keys.answer(order.number, self._agent, missing))

    def _to_come(self) -> int:
        """Ranks that this agent may still start. `_replace` moves one from the budget to the wanted: it never counts as none."""
        return self._order.budget + self._wanted - self._told

    def _want(self, wish: int) -> None:
        """Ask for a number for a new rank."""
        self._wanted += 1
        self._line.post(lambda keys: self._granted.put(keys.claim_member(self._agent, wish)))

    def _watch(self, head: Head | None) -> int | None:
        while True:
            self._forward_signals(head)  # first: ranks that the same signal has ended are not replaced
            self._start()
            for member, end in self.children.ended().items():
                self._line.post(lambda keys, member=member, end=end: keys.ended(member, end))  # type: ignore[misc]
                if end.code not in (0, FENCED) and member not in self._out:
                    self._replace(member)  # one that was left behind is replaced when the order comes
            if (code := self._obey(self._line.orders())) is not None:
                return code
            if self._begun and self._ending is None:
                self.children.spares.keep(self._order.budget)
            if head is not None and (code := head.look()) is not None:
                self.children.kill()
                head.close(code)
                return code
            if head is not None and head.deserted:
                return None
            self.inside = time.monotonic() - self._came
            if head is None and (why := self._line.lost()):
                self._stop(f"the meeting point {self._order.door} {why}: the ranks of this host stop")
                return None
            over = not self.children.running or time.monotonic() > self._until
            if head is None and self._ending is not None and over:  # the head waits for all agents
                return self._leave(f"got signal {self._ending - 128}", self._ending)
            time.sleep(LOOK)

    def _start(self) -> None:
        """Start the ranks that have got their numbers, or none if a signal came meanwhile."""
        granted = []
        while not self._granted.empty():
            granted.append(self._granted.get())
            if self._ending is None:
                self.children.start(granted[-1], self._point)
        if granted:
            started = list(self.children.processes)

            def tell(keys: AgentKeys) -> None:
                keys.started(self._agent, started)
                self._told += len(granted)  # now, and not before: the head must know of them all the time

            self._line.post(tell)

    def _replace(self, member: int, *, free: bool = False) -> None:
        """Start another rank for one that the job has lost."""
        self._out.add(member)
        if not self._begun:
            self._early.append(member)
            return
        if self._ending is not None or not (free or self._order.budget):
            return
        self._want(member + 1)
        self._order.budget -= not free

    def _forward_signals(self, head: Head | None) -> None:
        while self._sent < len(self._heard):
            number = self._heard[self._sent]
            if number == signal.SIGTSTP:  # the ranks have to stop before this process does
                del self._heard[self._sent]
                self.children.suspend_all()
                continue
            self._sent += 1
            self._until, self._ending = time.monotonic() + GRACE, self._ending or 128 + number
            if head is not None:
                head.signal(number)  # which sends it to all agents, this one as well
            else:
                self.children.signal(number)

    def _obey(self, orders: Sequence[Order]) -> int | None:
        for order in orders:
            if order.kind == "over":
                self.children.kill()
                return self._leave("the job is over", order.number)
            if order.kind == "begin":
                self._begun = True
                self.children.spares.postpone()
                for member in set(order.members).intersection(self._early):  # it was in that world; others failed to start
                    self._replace(member)
            elif order.kind == "signal":
                self.children.signal(order.number)
                self._until, self._ending = time.monotonic() + GRACE, self._ending or 128 + order.number
            elif order.kind == "probe":
                threading.Thread(target=self._probe, args=(order,), name="phalanx-probe", daemon=True).start()
            elif order.kind == "out":
                for member in set(order.members) & (self.children.processes.keys() - self._out):
                    self._replace(member, free=order.number == 1)
        return None

    def _leave(self, why: str, code: int) -> int:
        self.children.kill()
        self._line.post(lambda keys: keys.leave(self._agent, why))
        return code

    def _stop(self, why: str) -> None:
        """The meeting point is lost: let the ranks end on their own, so that they can save what they have learned."""
        say_last(why)
        until = time.monotonic() + GRACE
        while self.children.running and time.monotonic() < until:
            self.children.ended()
            while self._sent < len(self._heard):
                self.children.signal(self._heard[self._sent])
                self._sent += 1
            time.sleep(LOOK)


def _say_nothing(words: str) -> None:
    """Used if rank 0 prints the changes of membership itself."""

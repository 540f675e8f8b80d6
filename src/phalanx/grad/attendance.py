"""Whether this rank still takes part, and with whom: what it does when partners are late or gone, or when it is late itself.

`standing.decide` has the rules; here they are carried out. While every exchange arrives none of this communicates.
"""

from __future__ import annotations

import statistics
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.failure import CommunicationError
from phalanx.comm.verdict import name_ranks
from phalanx.grad.cargo import Cargo, lay_out
from phalanx.grad.flight import Airport, Flight
from phalanx.grad.gossip import Gossip
from phalanx.grad.lookout import Lookout
from phalanx.grad.partners import Partners, partners
from phalanx.grad.roll import Roll
from phalanx.grad.rollcall import roll_call
from phalanx.grad.standing import Hold, Leave, Place, Return, Word, decide, has_quorum, limit, unremarkable

LEAST_PATIENCE = 1.0  # seconds to wait for a partner where steps are short: processes are put off for longer than a step
PATIENCE = 4.0  # in usual steps
FIRST_PATIENCE = 60.0  # seconds, before it is known what a usual step is
PAUSE = 0.2  # seconds between two questions of a rank that is alone
REMEDY = "check its host and network, and start the job again from a checkpoint"

Replica = Callable[[], list[torch.Tensor]]


class Attendance:
    """The roll, the round, and whom to wait for, of one rank among `seats`: ranks, or hosts whose ranks act as one."""

    def __init__(self, comm: Communicator, sync: Gossip, airport: Airport, seats: int, me: int) -> None:
        self._comm, self._sync, self._airport, self._me = comm, sync, airport, me
        self.roll = Roll.of(seats)
        self.round = 0  # of the next exchange
        self.steps = 0  # of the optimizer
        self.replica: Replica = list  # what somebody who was left behind takes over
        self._lookout: Lookout | None = None
        self._left = comm  # those who answered the last roll call
        self._told: set[int] = set()
        self._doubt: set[int] = set()  # partners whose message did not come
        self._met = 0  # the round after the last exchange that arrived
        self._tickets = self._returns = 0
        self._times: deque[float] = deque(maxlen=32)
        self._last = 0.0  # when the last step mixed
        self._waited = 0.0  # seconds since then that this rank stood still for others

    def open(self) -> None:
        """All ranks call it before their first exchange. Not where hosts gossip, nor on GPUs."""
        if self._lookout is None:
            self._lookout = Lookout(self._comm, self._airport)
            weakref.finalize(self, self._lookout.line.close)

    def start_from(self, round_: int) -> None:
        """Of a job that was resumed."""
        self.round = self._met = round_

    # ---- patience --------------------------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds to wait for a partner."""
        if self._sync.patience is not None:
            return self._sync.patience
        return max(LEAST_PATIENCE, PATIENCE * statistics.median(self._times)) if self._times else FIRST_PATIENCE

    def begin_step(self) -> None:
        """Note the time since the last step; who was away for longer than the others wait has to ask where they are."""
        now = time.monotonic()
        if self._last:
            took = now - self._last - self._waited  # who only waited for others was not away
            if self._times and took > self.patience:
                self._doubt |= self._next_partners()
            self._times.append(took)
        self._last, self._waited = now, 0.0

    # ---- one exchange ----------------------------------------------------------------------------------------------------------

    def partners(self) -> Partners:
        """Those of the next exchange."""
        seats = self.roll.seats(self.round)
        if self._me not in seats:
            self._stop(f"the others found its connection broken and go on without it; {REMEDY}", [])
        return partners(self._me, seats, self.round, self._sync)

    def waits_for(self, peer: int | None) -> int | None:
        """`peer`, unless it does not take part now."""
        return None if peer is None or (self._lookout is not None and self._lookout.skips(peer, self.round)) else peer

    def _next_partners(self) -> set[int]:
        who = self.partners()
        return {peer for peer in map(self.waits_for, (who.dest, who.source)) if peer is not None}

    def landed(self, flight: Flight, told: Sequence[int]) -> None:
        """What became of a flight, and the roll that came with it."""
        self._waited += flight.waited
        for peer in flight.dead:
            self.roll = self.roll.strike(peer, flight.step)
        if flight.arrived:
            self._met = flight.step + 1
            self.roll = self.roll.merge(told)
        self._doubt |= flight.late | flight.jammed
        self._tell_missing()

    def end_step(self) -> None:
        """The exchange has begun: say so to those who ask."""
        if self._lookout is not None:
            due = self._average_due(self.steps)
            self._lookout.board.publish(round=self.round, steps=self.steps, leaves=self.roll.leaves, gathering=due)

    def _average_due(self, steps: int) -> bool:
        """Whether all ranks average after the step that mixes when `steps` are counted."""
        every = self._sync.average_every
        return every is not None and (steps + (self._sync.exchange == "gradients")) % every == 0

    # ---- catching up -----------------------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Do what others asked for; where messages were missing, find out why. False where this step has no exchange."""
        lookout = self._lookout
        if lookout is None:
            return True
        if lookout.board.busy:
            self.serve()
        if lookout.skipped:
            lookout.retry(self._place())
        doubt = {peer for peer in self._doubt if peer not in self.roll.struck}
        self._doubt = set()
        if not doubt:
            return True
        begun = time.monotonic()
        try:
            words, ended = lookout.ask(doubt)
            if words.keys() == doubt and unremarkable(self._place(), words):
                return True
            return self._look_around(lookout, doubt, words, ended)
        finally:
            self._waited += time.monotonic() - begun

    def serve(self) -> None:
        """Give the replica to those who want it, and welcome those who are back."""
        assert self._lookout is not None
        wants, backs = self._lookout.board.take()
        for back in backs:
            self._lookout.welcome(back)
        for want in wants:
            tensors = self.replica()
            layout = lay_out(tensors, None)
            if want.rank in self.roll.struck:
                continue
            if layout.digest != want.digest:
                self._lookout.ask([want.rank], ask="unlike", ticket=want.ticket)
                continue
            cargo = Cargo(layout, tensors[0].device)
            cargo.pack(tensors)
            self._airport.give(cargo, want.rank, want.ticket)

    def _look_around(self, lookout: Lookout, asked: set[int], words: dict[int, Word], ended: frozenset[int]) -> bool:
        """Ask everybody else as well, and do as `decide` says; stand still while this rank is alone."""
        until = time.monotonic() + self._comm.patience
        held = False
        while True:
            more, refused = lookout.ask([rank for rank in self._place().others() if rank not in asked])
            words = {**words, **more}
            self._strike(ended | refused)
            for word in words.values():
                if not word.leaves[self._me]:
                    self.roll = self.roll.merge(word.leaves)
            self._tell_missing()
            place = self._place()
            action = decide(place, words)
            silent = frozenset(place.others()) - words.keys()
            if isinstance(action, Leave):
                self._stop(
                    f"{name_ranks(action.by)} went on without it: it did not come to average_(), spread() or survivors() within "
                    f"{self._comm.patience:g} s, or its connection broke; {REMEDY}",
                    action.by,
                )
            elif isinstance(action, Hold):
                if time.monotonic() > until:
                    self._stop_as_minority(action.silent)
                if not held:
                    held = True
                    self._warn(
                        f"{name_ranks(action.silent)} do not answer, and what is left is no majority of {self._alive()} ranks. "
                        f"This rank stands still in round {self.round}, asks again for {self._comm.patience:g} s, and then stops"
                    )
                lookout.skip(silent, silent)
                time.sleep(PAUSE)
                asked, words, ended = set(), {}, frozenset()
            elif isinstance(action, Return) and action.helpers and not self._adopt(lookout, action):
                asked, words, ended = set(), {}, frozenset()
                if time.monotonic() > until:
                    self._stop(f"it is {action.behind} rounds behind, and no rank gave it its replica; {REMEDY}", action.helpers)
            else:
                if held:
                    self._warn(f"it reaches {name_ranks(sorted(words))} again")
                self._tell_skipped(lookout, action.skips, words)
                lookout.skip(action.skips, silent)
                return self._return(lookout, action, words) if isinstance(action, Return) else True

    def _adopt(self, lookout: Lookout, action: Return) -> bool:
        """Take over the replica of one of the helpers."""
        tensors = self.replica()
        layout = lay_out(tensors, None)
        for helper in action.helpers[:2]:
            self._tickets += 1
            heard, _ = lookout.ask([helper], ask="replica", ticket=self._tickets, digest=layout.digest)
            cargo = Cargo(layout, tensors[0].device)
            unlike = partial(lookout.board.unlike, self._tickets)
            if heard and self._airport.accept(cargo, helper, self._tickets, self._comm.patience, unlike):
                cargo.unpack(tensors)
                self._tell_rejoined(action.behind, helper)
                return True
            if unlike():
                self._warn(f"it is {action.behind} rounds behind, and keeps its replica: that of rank {helper} has another state")
                return True
        return False

    def _return(self, lookout: Lookout, action: Return, words: dict[int, Word]) -> bool:
        """Be where the furthest is by now, and tell all. False where the others wait for all: nobody exchanges then."""
        if action.helpers:  # the replica took its time
            words = lookout.ask(words)[0] or words
        exchanges = self._follow(max(words.values(), key=lambda word: word.round), adopted=bool(action.helpers))
        self._met = self.round
        self.end_step()
        passed = lookout.tell_back(self.roll, self.round).values()
        if exchanges and passed:
            # they wait for this rank from the told round on, so it may well go further: to where they were when they heard of it
            exchanges = self._follow(max(passed, key=lambda word: word.round), adopted=False)
        return exchanges

    def _follow(self, furthest: Word, *, adopted: bool) -> bool:
        """Take over round and steps of a rank that is further. False where it waits for all: nobody exchanges then."""
        if furthest.round < self.round + (not adopted):
            return True
        # one further than the furthest: it is caught up with, where it could not catch up itself; but not past an average
        sits_out = furthest.gathering and furthest.round > self.round
        ahead = 0 if sits_out or self._average_due(furthest.steps + 1) else 1
        self.steps = furthest.steps + (0 if sits_out else 1 + ahead)
        self.round = furthest.round + ahead
        return not sits_out

    def _strike(self, ended: frozenset[int]) -> None:
        for rank in ended:
            self.roll = self.roll.strike(rank, self.round)

    def _place(self) -> Place:
        return Place(self._me, self.round, self.roll)

    # ---- all together ----------------------------------------------------------------------------------------------------------

    def call(self) -> tuple[Communicator, bool, int]:
        """A communicator of all who are left, whether this rank's replica counts in a mean, and how many do.

        A replica that trained alone for longer than two periods does not, unless all did.
        """
        lookout = self._lookout
        alone = self.round - self._met > limit(len(self.roll.leaves)) + 1
        if lookout is not None:
            lookout.board.publish(gathering=True, round=self.round, steps=self.steps)
        serve = self.serve if lookout is not None else lambda: None
        called = roll_call(self._comm, self.roll, self.round, self._airport.call_tag(), alone=alone, meanwhile=serve)
        self.roll, self.round = called.roll, called.step
        self._tell_missing()
        left = [seat for seat in range(self._comm.size) if seat not in self.roll.struck]
        if not has_quorum(left, self._comm.size, self.roll.dead):
            self._stop_as_minority([rank for rank in self.roll.struck if rank not in self.roll.dead])
        if self._me not in left:
            self._stop(f"the others did not wait for it any longer; {REMEDY}", [])
        if lookout is not None:
            lookout.everybody_met()
            self._doubt.clear()
            lookout.board.publish(gathering=False, round=self.round, leaves=self.roll.leaves)
        if len(left) < self._left.size:
            self._left = self._comm.survivors(left)
        counting = [rank for rank in left if rank not in called.alone] or left
        if alone and self._me not in counting:
            self._warn(
                f"it trained alone for {called.step - self._met} rounds, so its replica does not count in the mean of the others"
            )
        self._met = self.round
        return self._left, self._me in counting, len(counting)

    # ---- what is told ----------------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to be dead or left out, or did not answer when they were asked last."""
        silent = self._lookout.silent if self._lookout is not None else frozenset()
        return tuple(sorted({*self.roll.struck, *silent}))

    def _alive(self) -> int:
        return len(self.roll.leaves) - len(self.roll.dead)

    def _warn(self, text: str) -> None:
        warnings.warn(f"rank {self._comm.rank}: {text}", stacklevel=2)

    def _tell_missing(self) -> None:
        new = [seat for seat in self.roll.struck if seat not in self._told]
        self._told.update(new)
        if new:
            left = len(self.roll.leaves) - len(self.roll.struck)
            self._warn(
                f"{name_ranks(new)} cannot be reached any more; gossip goes on without. "
                f"{left} of {len(self.roll.leaves)} are left"
            )

    def _tell_skipped(self, lookout: Lookout, skips: frozenset[int], words: Mapping[int, Word]) -> None:
        new = sorted(skips - lookout.skipped)
        silent = [rank for rank in new if rank not in words]
        behind = [rank for rank in new if rank in words and not words[rank].gathering]
        if silent:
            self._warn(f"{name_ranks(silent)} did not answer in round {self.round}; gossip goes on without, until it is back")
        if behind:
            rounds = self.round - min(words[rank].round for rank in behind)
            self._warn(f"{name_ranks(behind)} fell {rounds} rounds behind; gossip goes on without, until it is back")

    def _tell_rejoined(self, behind: int, helper: int) -> None:
        self._returns += 1
        if self._returns & (self._returns - 1) == 0:  # the 1st, 2nd, 4th, 8th time: a rank that is always slow does it often
            self._warn(
                f"it was left behind by {behind} rounds. It takes over the replica of rank {helper} and takes part again"
                + (f" (for the {self._returns}th time)" if self._returns > 2 else "")
            )

    def _stop_as_minority(self, silent: Sequence[int]) -> NoReturn:
        here = self._alive() - len(silent)
        self._stop(
            f"it cannot reach {name_ranks(silent)}: {here} of {self._alive()} ranks are no majority (half of them is one, with "
            f"the lowest rank), and must not train on alone; {REMEDY}",
            silent,
        )

    def _stop(self, why: str, missing: Sequence[int]) -> NoReturn:
        """This rank ends, and the others do not: they go on without it."""
        error = CommunicationError(f"rank {self._comm.rank}: gossip stops here: {why}", operation="gossip", missing=missing)
        self._comm.part()
        raise error

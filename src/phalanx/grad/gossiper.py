"""GossipGraD at work: after each update one exchange with one partner; now and then, if wanted, the exact mean of all.

    step t           update        exchange t leaves          (partners of round t)
    step t + 1       update        exchange t lands, exchange t + 1 leaves

Without overlap exchange t lands in step t. The optimizer says what travels; here is when, with whom, and what if nobody answers.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.averager import StepRecord
from phalanx.grad.cargo import WORD, Cargo, Layout, average_together, drift, halves, lay_out
from phalanx.grad.flight import Airport, Flight, Kinds
from phalanx.grad.gossip import Gossip
from phalanx.grad.partners import Partners, check_topology, gossip_period, partners
from phalanx.grad.replicas import ReplicaError, odd
from phalanx.grad.roll import Roll
from phalanx.grad.rollcall import roll_call
from phalanx.grad.spread import spread
from phalanx.grad.travel import Journey

LEAST_PATIENCE = 1.0  # seconds to wait for a partner where steps are short: processes are put off for longer than a step
PATIENCE = 4.0  # in usual steps
FIRST_PATIENCE = 60.0  # seconds, before it is known what a usual step is
ROLL = torch.int32


def level_of(comm: Communicator, sync: Gossip) -> str:
    """Who gossips: ranks, or hosts whose ranks act as one."""
    return sync.level or ("host" if comm.size > comm.inter_size > 1 else "rank")


class Gossiper:
    """Mixes the tensors of this rank with those of others. `home` has the ranks of this host, where hosts gossip."""

    def __init__(self, comm: Communicator, home: Communicator | None, sync: Gossip, wire: torch.dtype | None) -> None:
        self._comm, self._home, self._sync, self._wire = comm, home, sync, wire
        self._seats, self._me = (comm.size, comm.rank) if home is None else (comm.inter_size, comm.inter_rank)
        check_topology(sync, self._seats, "ranks" if home is None else "hosts")
        self._roll = Roll.of(self._seats)
        self._told: set[int] = set()
        self._left = comm  # those who answered the last roll call
        self._airport = Airport(comm)
        # the ranks of every host, of which as many carry a part of the message as the smallest host has
        self._crews = [[rank] for rank in range(comm.size)] if home is None else _crews(comm)
        self._carriers = min(map(len, self._crews))
        self._kinds: Kinds | None = None
        self._layout: Layout | None = None
        self._whole: torch.Tensor | None = None  # where the ranks of a host put their parts together
        self._count = 0  # tensors that drift, in the layout
        self._agreed = False
        self._flight: Flight | None = None
        self._restored: dict[str, torch.Tensor] | None = None
        self.round = 0  # of the next exchange
        self.record: StepRecord | None = None
        self.journeys: list[Journey] = []
        self._times: deque[float] = deque(maxlen=32)
        self._last = 0.0  # when the last exchange began
        self._waited = 0.0  # seconds since then that this rank stood still for others
        self._away: float | None = None  # since when this rank may have been slower than the others would wait
        self._heard = 0  # exchanges that arrived since then

    # ---- one exchange --------------------------------------------------------------------------------------------------------

    def mix(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """After an update: `drifting` are parameters and, the last `optional` of them, optimizer state; `averaged` statistics."""
        self.record, self.journeys = None, []
        if self._seats == 1:
            self._mean_at_home(averaged)
            return
        self._agree(drifting, optional, averaged)
        if self._sync.overlap:
            self.settle(drifting, optional, averaged)
        self._mean_at_home(averaged)
        self._begin(drifting, averaged)
        if not self._sync.overlap:
            self.settle(drifting, optional, averaged)

    def mix_gradients(self, gradients: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        """Before an update: each becomes the mean of itself and the partner's, which with overlap is that of the step before."""
        self.record, self.journeys = None, []
        self._mean_at_home(averaged)
        if self._seats == 1:
            return
        self._agree(gradients, 0, averaged)
        previous = self._land() if self._sync.overlap else None
        self._begin(gradients, averaged)
        flight = previous if self._sync.overlap else self._land()
        if flight is not None:
            if _fit(flight.kinds, self._kinds):
                halves([*gradients, *averaged], flight.received.views[: len(gradients) + len(averaged)])
            self._airport.release(flight)

    def _mean_at_home(self, averaged: Sequence[torch.Tensor]) -> None:
        if self._home is not None:
            average_together(averaged, self._home)

    def settle(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """Land what is under way, and mix it with what it was made of."""
        flight = self._land()
        if flight is None:
            return
        if _fit(flight.kinds, _kinds(drifting, optional, averaged)):  # else parameters came or went meanwhile, on all ranks
            sent, received = flight.sent.views, flight.received.views
            count = len(received) - len(averaged) - self._trailer
            if self._sync.overlap or self._wire is not None:
                drift(drifting[:count], sent[:count], received[:count])
            else:
                halves(drifting[:count], received[:count])
            halves(averaged, received[count : count + len(averaged)])
        self._airport.release(flight)

    def _begin(self, drifting: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        self._note_time()
        who = partners(self._me, self._seats_now(), self.round, self._sync)
        self.round += 1
        if who.dest is None or who.source is None or self._layout is None:
            return
        roll = [torch.tensor(self._roll.leaves, dtype=ROLL)] if self._trailer else []
        tensors = [*drifting[: self._count], *averaged, *roll]
        device = tensors[0].device
        sent, received = self._airport.cargo(self._layout, device), self._airport.cargo(self._layout, device)
        sent.pack(tensors)
        flight = self._flight = Flight(self.round - 1, who, sent, received, self._travelling)
        mine = 0 if self._home is None else self._home.rank
        if mine < self._carriers:
            length = len(sent.words) // self._carriers
            part = slice(mine * length, (mine + 1) * length)
            self._airport.start(flight, part, self._crews[who.dest][mine], self._crews[who.source][mine])

    def _land(self) -> Flight | None:
        """The flight under way, if its message has arrived; on all ranks of a host alike."""
        flight, self._flight = self._flight, None
        if flight is None:
            return self._take_restored()
        self._airport.land(flight, self.patience)
        self._waited += flight.waited
        nbytes = flight.sent.words.nbytes // self._carriers
        self.journeys.append(Journey(flight.left, flight.ended, nbytes))
        self.record = StepRecord(flight.waited, flight.ended - flight.left, nbytes if self._sync.overlap else 0, nbytes)
        if self._home is not None:
            self._gather_at_home(flight)
            return flight
        self._look_for(flight)
        if flight.arrived:
            self._roll = self._roll.merge(flight.received.views[-1].tolist())
            self._tell()
            return flight
        self._airport.release(flight)
        return None

    def _gather_at_home(self, flight: Flight) -> None:
        """Every rank of the host has a part of the message: all of it to all of them."""
        assert self._home is not None
        mine, length = self._home.rank, len(flight.sent.words) // self._carriers
        words = flight.sent.words
        if self._whole is None or len(self._whole) != len(words):
            self._whole = self._home.buffer(len(words), words.dtype, words.device)
        whole = self._whole.zero_()
        if mine < self._carriers:
            part = slice(mine * length, (mine + 1) * length)
            whole[part] = (flight.received if flight.arrived else flight.sent).words[part]  # what was sent moves nothing
        self._home.all_reduce(whole)
        if flight.late:  # the message may still come
            flight.received = Cargo(flight.received.layout, whole.device)
        flight.received.words.copy_(whole)

    def _agree(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """On what travels: state only once all ranks have it. All ranks ask each other when their own tensors have changed."""
        kinds = _kinds(drifting, optional, averaged)
        if kinds == self._kinds and self._agreed:
            return
        roll = [torch.empty(self._seats, dtype=ROLL)] if self._trailer else []
        always = drifting[: len(drifting) - optional]
        layouts = [lay_out([*x, *averaged, *roll], self._wire, parts=self._carriers) for x in (drifting, always)]
        told = self._comm.allgather_obj([layout.digest for layout in layouts])
        if who := odd([own[1] for own in told]):
            raise ReplicaError(f"parameters or followed buffers differ in number, shape or dtype: {who} from rank 0")
        self._kinds, self._agreed = kinds, not odd([own[0] for own in told])
        self._layout = layouts[0 if self._agreed else 1] if drifting or averaged else None
        self._count = len(drifting if self._agreed else always)

    @property
    def _travelling(self) -> Kinds:
        """Of what is sent now: state that some ranks do not have yet stays at home."""
        assert self._kinds is not None
        parameters, state, averaged = self._kinds
        return parameters, state if self._agreed else None, averaged

    @property
    def _trailer(self) -> int:
        """Tensors at the end of a message that are ours: the roll, unless hosts gossip, whose ranks need each other anyway."""
        return 1 if self._home is None else 0

    # ---- partners that are late or gone ----------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds to wait for a partner."""
        if self._sync.patience is not None:
            return self._sync.patience
        return max(LEAST_PATIENCE, PATIENCE * statistics.median(self._times)) if self._times else FIRST_PATIENCE

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to be dead."""
        return self._roll.struck if self._home is None else ()

    def _seats_now(self) -> list[int]:
        seats = self._roll.seats(self.round)
        if self._me not in seats:
            raise RuntimeError(
                f"rank {self._comm.rank}: the others found its connection broken and go on without it; start the job again from "
                "a checkpoint to have it back"
            )
        return seats

    def _note_time(self) -> None:
        now = time.monotonic()
        if self._last:
            took = now - self._last - self._waited  # who only waited for others was not away
            if self._times and took > self.patience and self._away is None:
                self._away, self._heard = self._last, 0
            self._times.append(took)
        self._last, self._waited = now, 0.0

    def _look_for(self, flight: Flight) -> None:
        """What a lost message means: a death is told, a rank that was away itself goes where the others must be by now."""
        for peer in flight.dead:
            self._roll = self._roll.strike(peer, flight.step)
        self._tell()
        if self._away is None:
            return
        self._heard += flight.arrived
        if flight.source in flight.late:
            # too far rather than not far enough: who waits is caught up with
            self.round += math.ceil((time.monotonic() - self._away) / statistics.median(self._times))
            self._away = None
        elif self._heard > 2 * gossip_period(self._seats) + 4:
            self._away = None  # the others were away as well

    def _tell(self) -> None:
        new = [seat for seat in self._roll.struck if seat not in self._told]
        self._told.update(new)
        if new:
            ranks = "rank" if len(new) == 1 else "ranks"
            warnings.warn(
                f"rank {self._comm.rank}: {ranks} {', '.join(map(str, new))} cannot be reached any more; gossip goes on without. "
                f"{self._seats - len(self._roll.struck)} of {self._seats} are left",
                stacklevel=6,
            )

    # ---- all together ----------------------------------------------------------------------------------------------------------

    def survivors(self) -> Communicator:
        """A communicator of all who are left. All of them call it: each asks each, so that all know of the same ones."""
        if self._home is not None or self._seats == 1:
            return self._comm
        self._roll, self.round = roll_call(self._comm, self._roll, self.round, self._airport.call_tag())
        self._tell()
        left = [seat for seat in range(self._seats) if seat not in self._roll.struck]
        if len(left) < self._left.size:
            self._left = self._comm.survivors(left)
        return self._left

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        average_together(tensors, self.survivors())

    def spread(self, parameters: Sequence[torch.Tensor]) -> float:
        return spread(parameters, self.survivors())

    # ---- what the next step takes over ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The number of the next exchange, and the one under way: what was sent, and what came. Waits for it."""
        flight = self._flight
        under_way: dict[str, torch.Tensor] = {}
        if flight is not None:
            came = self._airport.peek(flight, self.patience)
            sent = flight.sent.words.clone()
            under_way = {"sent": sent, "received": flight.received.words.clone() if came else sent.clone()}
        return {"round": self.round, "seats": self._seats, "under_way": under_way or self._restored or {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. With another number of seats only the tensors of the replica count, and rounds begin anew."""
        same = state["seats"] == self._seats
        self.round = int(state["round"]) if same else 0
        under_way = state["under_way"]
        self._restored = {name: x.clone() for name, x in under_way.items()} if same and under_way else None

    def _take_restored(self) -> Flight | None:
        """What was under way when the state was saved."""
        words, self._restored = self._restored, None
        layout = self._layout
        if words is None or layout is None or words["sent"].numel() != layout.nbytes // WORD.itemsize:
            return None
        device = words["sent"].device
        flight = Flight(self.round - 1, Partners(None, None), Cargo(layout, device), Cargo(layout, device), self._travelling)
        flight.sent.words.copy_(words["sent"])
        flight.received.words.copy_(words["received"])
        flight.arrived = True
        if self._home is not None:
            self._gather_at_home(flight)
        return flight


def _kinds(drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> Kinds:
    """What parameters, state and statistics look like."""
    kinds = [(x.shape, x.dtype, x.stride()) for x in drifting]
    split = len(drifting) - optional
    return tuple(kinds[:split]), tuple(kinds[split:]), tuple((x.shape, x.dtype, x.stride()) for x in averaged)


def _fit(sent: Kinds, now: Kinds | None) -> bool:
    """Whether what was sent is of the tensors that there are now."""
    return now is not None and (sent[0], sent[2]) == (now[0], now[2]) and sent[1] in (None, now[1])


def _crews(comm: Communicator) -> list[list[int]]:
    """The ranks of every host."""
    hosts = comm.allgather_obj(comm.inter_rank)
    return [[rank for rank, host in enumerate(hosts) if host == number] for number in range(comm.inter_size)]

"""GossipGraD in an elastic job: `phalanx run` decides who takes part, and every exchange counts for all ranks or for none.

    step t           update        exchange t is sent
    step t + 1       update        exchange t arrives: all ranks commit it, or none mixes it       exchange t + 1 is sent

An exchange in which a rank dies, or after which one joins, is dropped on all ranks, so the mean of the replicas does not change.
The next one has partners for the new number of ranks. What the dead rank trained in that step reached no other rank, so its
samples are trained again. In other jobs, Gossiper drops single messages instead, and finds out itself which ranks are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.communicator import ElasticCommunicator
from phalanx.comm.failure import CommunicationError
from phalanx.comm.pending import Pending
from phalanx.grad.gossip import Gossip
from phalanx.grad.gossip.kinds import Kinds, fit, kinds_of
from phalanx.grad.gossip.mixing import drift, shares
from phalanx.grad.gossip.packet import WORD, Packet, PacketLayout, average_together, lay_out
from phalanx.grad.gossip.partners import Partners, partners
from phalanx.grad.gossip.spread import spread
from phalanx.grad.gossip.transfer import OWN_TAGS, serial_of
from phalanx.grad.record import StepRecord
from phalanx.grad.reducer import TransferTime
from phalanx.grad.replicas import ReplicaError, odd

CPU = torch.device("cpu")


class Exchange:
    """One exchange with one partner, sent in the world `epoch`."""

    def __init__(self, epoch: int, sent: Packet, received: Packet, kinds: Kinds, weight: float) -> None:
        self.epoch, self.sent, self.received, self.kinds, self.weight = epoch, sent, received, kinds, weight
        self.pending: Pending | None = None
        self.left = time.perf_counter()
        self.committed = False  # all ranks know whether it counts
        self.counts = False


class ElasticGossiper:
    """Mixes the tensors of this rank with those of others, as Gossiper does, on ranks that may die and join."""

    missing: tuple[int, ...] = ()  # a missing rank is no longer a member

    def __init__(self, comm: ElasticCommunicator, sync: Gossip, wire: torch.dtype | None) -> None:
        self._comm, self._sync, self._wire = comm, sync, wire
        self._serial = serial_of(comm)
        self.round = self.steps = 0  # of the next exchange, and of the optimizer
        self._kinds: Kinds | None = None
        self._agreed_in = -1  # the epoch whose ranks have agreed on what to send
        self._with_state = False  # optimizer state is sent, too
        self._layout: PacketLayout | None = None
        self._spare: list[Packet] = []
        self._exchange: Exchange | None = None
        self._restored: dict[str, torch.Tensor] | None = None
        self.record: StepRecord | None = None
        self.transfers: list[TransferTime] = []
        comm.on_landing(self.land)

    def offer(self, replica: Callable[[], list[torch.Tensor]]) -> None:
        """A rank that joins gets its replica from `opt.share()`, and no rank is left behind."""

    # ---- one exchange --------------------------------------------------------------------------------------------------------

    def mix(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """Exchange after an update. `drifting`: parameters, then `optional` optimizer tensors. `averaged`: statistics."""
        self.record, self.transfers = None, []
        self._travelling(drifting, optional, averaged)  # an exchange from a checkpoint was made from these tensors
        if self._sync.overlap:
            self.settle(drifting, optional, averaged)
        self._depart(drifting, optional, averaged)
        if not self._sync.overlap:
            self.settle(drifting, optional, averaged)

    def mix_gradients(self, gradients: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        """Before an update, average each with the partner's, which with overlap is from the previous step."""
        self.record, self.transfers = None, []
        self._travelling(gradients, 0, averaged)
        came = self._taken() if self._sync.overlap else None
        self._depart(gradients, 0, averaged)
        came = came if self._sync.overlap else self._taken()
        if came is not None:
            if fit(came.kinds, kinds_of(gradients, 0, averaged)):
                mine = [*gradients, *averaged]
                shares(mine, came.received.views[: len(mine)], came.weight)
            self._release(came)

    def settle(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """Receive the pending exchange, and mix it with the tensors it was made from. All ranks call it."""
        came = self._taken()
        if came is None:
            return
        if fit(came.kinds, kinds_of(drifting, optional, averaged)):
            sent, received = came.sent.views, came.received.views
            count = len(received) - len(averaged)
            if self._sync.overlap or self._wire is not None:
                drift(drifting[:count], sent[:count], received[:count], came.weight)
            else:
                shares(drifting[:count], received[:count], came.weight)
            shares(averaged, received[count:], came.weight)
        self._release(came)

    def _depart(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        tensors = self._travelling(drifting, optional, averaged)
        who, self.round = self._partners(), self.round + 1
        if self._layout is None:
            return
        sent, received = (self._packet(self._layout) for _ in range(2))
        sent.pack(tensors)
        assert self._kinds is not None
        parameters, state, statistics = self._kinds
        kinds = parameters, state if self._with_state else None, statistics
        self._exchange = Exchange(self._comm.membership.epoch, sent, received, kinds, who.weight)
        self._comm.in_flight += 1
        if who.dest is not None and who.source is not None and not self._comm.unsettled:
            self._send(self._exchange, who)

    def _partners(self) -> Partners:
        if self._comm.size == 1:
            return Partners(None, None)
        return partners(self._comm.rank, range(self._comm.size), self.round, self._sync)

    def _send(self, exchange: Exchange, who: Partners) -> None:
        assert who.dest is not None
        assert who.source is not None
        try:
            exchange.pending = self._comm.exchange_async(
                exchange.sent.words, who.dest, exchange.received.words, who.source, self._serial * OWN_TAGS + self.round
            )
        except CommunicationError:  # the world broke just now: all ranks drop this exchange
            if not self._comm.unsettled:
                raise

    def land(self, *, at_end: bool = False) -> None:
        """Commit the exchange in flight. The next step mixes what was received. All ranks call it."""
        exchange = self._exchange
        if exchange is None or exchange.committed:
            return
        begun = time.perf_counter()

        def arrive() -> bool:
            if exchange.epoch != self._comm.membership.epoch:
                return False
            if exchange.pending is not None:
                exchange.pending.wait()
            self._comm.barrier()  # a message shows that one rank has made its step, but a result must show that all have
            return True

        arrived = self._comm.round(arrive, counts=True)
        exchange.committed, exchange.counts = True, arrived and exchange.pending is not None
        self._comm.in_flight -= 1
        if exchange.counts and exchange.pending is not None:
            waited, ended, nbytes = time.perf_counter() - begun, exchange.pending.ended, exchange.sent.words.nbytes
            self.transfers.append(TransferTime(exchange.left, ended, nbytes))
            self.record = StepRecord(waited, ended - exchange.left, nbytes if self._sync.overlap else 0, nbytes, begun)

    def _taken(self) -> Exchange | None:
        """The received exchange, if it counts."""
        self.land()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return self._take_restored()
        if exchange.counts:
            return exchange
        self._release(exchange)
        return None

    # ---- a rank that joins -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What it gets beside a replica: the round, and whether the others have an exchange in flight, which all will drop."""
        return {"round": self.round, "in_flight": self._exchange is not None and not self._exchange.committed}

    def load(self, state: dict[str, Any]) -> None:
        before = self.state()  # of an earlier try to join, in which a rank died
        self.round, self._exchange = state["round"], None
        if state["in_flight"]:
            nothing = Packet(lay_out([], None), CPU)
            self._exchange = Exchange(-1, nothing, nothing, ((), None, ()), 0.0)
        self._comm.in_flight += state["in_flight"] - before["in_flight"]

    # ---- what is sent ----------------------------------------------------------------------------------------------------------

    def _travelling(
        self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Agree on it in every new world, and when the tensors change. Optimizer state is sent once all ranks have it."""
        always = drifting[: len(drifting) - optional]
        kinds = kinds_of(drifting, optional, averaged)
        if kinds != self._kinds or not self._with_state or self._agreed_in != self._comm.membership.epoch:
            if any(x.device != CPU for x in (*drifting, *averaged)):
                raise ValueError(
                    "sync=Gossip with elastic=True runs only on CPUs: on GPUs use AllReduce, or gossip without elastic=True"
                )
            layouts = [lay_out([*x, *averaged], self._wire) for x in (drifting, always)]
            told = self._comm.round(lambda: self._comm.allgather_obj([layout.digest for layout in layouts]))
            if who := odd([own[1] for own in told]):
                raise ReplicaError(f"parameters or followed buffers differ in number, shape or dtype: {who} from rank 0")
            self._kinds, self._with_state = kinds, not odd([own[0] for own in told])
            self._layout = layouts[0 if self._with_state else 1] if drifting or averaged else None
            self._agreed_in = self._comm.membership.epoch
            self._spare = []
        return [*(drifting if self._with_state else always), *averaged]

    def _packet(self, layout: PacketLayout) -> Packet:
        return self._spare.pop() if self._spare else Packet(layout, CPU)

    def _release(self, exchange: Exchange) -> None:
        """Reuse its memory, unless it was dropped: then its memory may still be written to."""
        if exchange.counts and self._layout is not None and exchange.sent.layout == self._layout:
            self._spare = [exchange.sent, exchange.received]

    # ---- all together ----------------------------------------------------------------------------------------------------------

    def survivors(self) -> Communicator:
        """All current ranks."""
        return self._comm

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make each tensor the mean over all ranks."""
        average_together(tensors, self._comm)

    def spread(self, parameters: Sequence[torch.Tensor]) -> float:
        return self._comm.as_one(lambda: spread(parameters, self._comm))

    # ---- what the next step takes over ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As Gossiper's. All ranks call it."""
        self.land()
        exchange = self._exchange
        under_way: dict[str, torch.Tensor] = {}
        if exchange is not None and exchange.counts:
            weight = torch.tensor(exchange.weight, dtype=torch.float64)
            under_way = {"sent": exchange.sent.words.clone(), "received": exchange.received.words.clone(), "weight": weight}
        return {"round": self.round, "seats": self._comm.size, "under_way": under_way or self._restored or {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. With another number of ranks only the replica's tensors are used, and rounds restart."""
        same = state["seats"] == self._comm.size
        self.round = int(state["round"]) if same else 0
        self._restored = {name: x.clone() for name, x in state["under_way"].items()} or None if same else None

    def _take_restored(self) -> Exchange | None:
        """Return the exchange that was pending when the state was saved."""
        words, layout, kinds = self._restored, self._layout, self._kinds
        if words is None or layout is None or kinds is None:
            return None
        self._restored = None
        if words["sent"].numel() != layout.nbytes // WORD.itemsize:
            return None
        exchange = Exchange(-1, Packet(layout, CPU), Packet(layout, CPU), kinds, float(words["weight"]))
        exchange.sent.words.copy_(words["sent"])
        exchange.received.words.copy_(words["received"])
        exchange.committed = exchange.counts = True
        return exchange

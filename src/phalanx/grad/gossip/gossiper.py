"""Runs GossipGraD: after each update one exchange with one partner and, if configured, sometimes the exact mean of all ranks.

    step t           update        exchange t is sent         (partners of round t)
    step t + 1       update        exchange t is received, exchange t + 1 is sent

Without overlap exchange t is received in step t. The optimizer decides what is sent. This file decides when, to which rank, and
what to do if it does not answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip import Gossip
from phalanx.grad.gossip.attendance import Attendance
from phalanx.grad.gossip.kinds import Kinds, fit, kinds_of
from phalanx.grad.gossip.mixing import drift, shares
from phalanx.grad.gossip.packet import WORD, Packet, PacketLayout, average_together, lay_out
from phalanx.grad.gossip.partners import Partners, check_topology
from phalanx.grad.gossip.spread import spread
from phalanx.grad.gossip.transfer import Transfer, Transfers
from phalanx.grad.record import StepRecord
from phalanx.grad.reducer import TransferTime
from phalanx.grad.replicas import ReplicaError, odd

NOTE = torch.int32  # of the membership and the step before it; the step is sent plus one, so that zeros are not a message


class Gossiper:
    """Mixes the tensors of this rank with those of others. `home` has the ranks of this host, if hosts gossip."""

    def __init__(self, comm: Communicator, home: Communicator | None, sync: Gossip, wire: torch.dtype | None) -> None:
        self._comm, self._home, self._sync, self._wire = comm, home, sync, wire
        self._nodes, self._me = (comm.size, comm.rank) if home is None else (comm.inter_size, comm.inter_rank)
        check_topology(sync, self._nodes, "ranks" if home is None else "hosts")
        self._transfers = Transfers(comm)
        self._attendance = Attendance(comm, sync, self._transfers, self._nodes, self._me)
        # the ranks of every host; each host uses as many of them to carry parts of the message as the smallest host has
        self._crews = [[rank] for rank in range(comm.size)] if home is None else _crews(comm)
        self._carriers = min(map(len, self._crews))
        self._kinds: Kinds | None = None
        self._device = torch.device("cpu")  # of the tensors that are sent
        self._layout: PacketLayout | None = None
        self._whole: torch.Tensor | None = None  # where the ranks of a host assemble their parts
        self._count = 0  # number of drifting tensors in the layout
        self._agreed = False
        self._transfer: Transfer | None = None
        self._restored: dict[str, torch.Tensor] | None = None
        self.record: StepRecord | None = None
        self.transfers: list[TransferTime] = []

    @property
    def round(self) -> int:  # the paper's term
        """The number of the next exchange."""
        return self._attendance.round

    @round.setter  # noqa: A003
    def round(self, value: int) -> None:
        self._attendance.start_from(value)

    @property
    def steps(self) -> int:
        """The optimizer's step count. It sets this before an exchange; afterwards it is higher if this rank fell behind."""
        return self._attendance.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._attendance.steps = value

    def offer(self, replica: Callable[[], list[torch.Tensor]]) -> None:
        """Register what a rank that fell behind takes over from this one, or this one from another: everything in a replica.

        `replica` is a method of the owner of this gossiper, and does not keep it alive.
        """
        method = weakref.WeakMethod(replica)
        self._attendance.replica = lambda: (method() or list)()

    # ---- one exchange --------------------------------------------------------------------------------------------------------

    def mix(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """Exchange after an update. `drifting`: parameters, then `optional` optimizer tensors. `averaged`: statistics."""
        self.record, self.transfers = None, []
        if self._nodes == 1:
            self._mean_at_home(averaged)
            return
        self._agree(drifting, optional, averaged)
        self._attendance.begin_step()
        if self._sync.overlap:
            self.settle(drifting, optional, averaged)
        self._mean_at_home(averaged)
        self._begin(drifting, averaged)
        if not self._sync.overlap:
            self.settle(drifting, optional, averaged)

    def mix_gradients(self, gradients: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        """Before an update, average each with the partner's, which with overlap is from the previous step."""
        self.record, self.transfers = None, []
        self._mean_at_home(averaged)
        if self._nodes == 1:
            return
        self._agree(gradients, 0, averaged)
        self._attendance.begin_step()
        previous = self._land() if self._sync.overlap else None
        self._begin(gradients, averaged)
        transfer = previous if self._sync.overlap else self._land()
        if transfer is not None:
            if fit(transfer.kinds, self._kinds):
                mine = [*gradients, *averaged]
                shares(mine, transfer.received.views[: len(mine)], transfer.partners.weight)
            self._transfers.release(transfer)

    def _mean_at_home(self, averaged: Sequence[torch.Tensor]) -> None:
        if self._home is not None:
            average_together(averaged, self._home)

    def settle(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """Receive the pending exchange, and mix it with the tensors it was made from."""
        transfer = self._land()
        if transfer is None:
            return
        if fit(transfer.kinds, kinds_of(drifting, optional, averaged)):  # else all ranks added or removed parameters meanwhile
            sent, received, weight = transfer.sent.views, transfer.received.views, transfer.partners.weight
            count = len(received) - len(averaged) - self._trailer
            if self._sync.overlap or self._wire is not None:
                drift(drifting[:count], sent[:count], received[:count], weight)
            else:
                shares(drifting[:count], received[:count], weight)
            shares(averaged, received[count : count + len(averaged)], weight)
        self._transfers.release(transfer)

    def _begin(self, drifting: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        attendance = self._attendance
        if attendance.catch_up():
            self._depart(attendance.partners(), drifting, averaged)
            attendance.round += 1
        attendance.end_step()

    def _depart(self, who: Partners, drifting: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
        if who.dest is None or who.source is None or self._layout is None:
            return
        note = [torch.tensor([self.round + 1, *self._attendance.membership.leaves], dtype=NOTE)] if self._trailer else []
        tensors = [*drifting[: self._count], *averaged, *note]
        sent, received = (self._transfers.packet(self._layout, self._device) for _ in range(2))
        sent.pack(tensors)
        transfer = self._transfer = Transfer(self.round, who, sent, received, self._travelling)
        if self._home is None:
            dest, source = map(self._attendance.waits_for, (who.dest, who.source))
            self._transfers.start(transfer, slice(None), dest, source)
        elif (mine := self._home.rank) < self._carriers:
            length = len(sent.words) // self._carriers
            part = slice(mine * length, (mine + 1) * length)
            self._transfers.start(transfer, part, self._crews[who.dest][mine], self._crews[who.source][mine])

    def _land(self) -> Transfer | None:
        """Return the pending transfer if its message has arrived. All ranks of a host return the same."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return self._take_restored()
        self._transfers.land(transfer, self._attendance.patience)
        nbytes = transfer.sent.words.nbytes // self._carriers
        self.transfers.append(TransferTime(transfer.left, transfer.ended, nbytes))
        self.record = StepRecord(transfer.waited, transfer.ended - transfer.left, nbytes if self._sync.overlap else 0, nbytes)
        if self._home is not None:
            self._gather_at_home(transfer)
            return transfer
        membership: Sequence[int] = self._attendance.membership.leaves
        if self._trailer:
            step, *membership = transfer.received.views[-1].tolist() if transfer.arrived else [0]
            transfer.arrived = step == transfer.step + 1  # zeros are from a rank that was away, and only match a pending receive
        self._attendance.landed(transfer, membership)
        if transfer.arrived:
            return transfer
        self._transfers.release(transfer)
        return None

    def _gather_at_home(self, transfer: Transfer) -> None:
        """Assemble the message on every rank of the host from the parts that each of them received."""
        assert self._home is not None
        mine, length = self._home.rank, len(transfer.sent.words) // self._carriers
        words = transfer.sent.words
        if self._whole is None or len(self._whole) != len(words):
            self._whole = self._home.buffer(len(words), words.dtype, words.device)
        whole = self._whole.zero_()
        if mine < self._carriers:
            part = slice(mine * length, (mine + 1) * length)
            whole[part] = (transfer.received if transfer.arrived else transfer.sent).words[part]  # mixing `sent` changes nothing
        self._home.all_reduce(whole)
        if transfer.late:  # the message may still arrive
            transfer.received = Packet(transfer.received.layout, whole.device)
        transfer.received.words.copy_(whole)

    def _agree(self, drifting: Sequence[torch.Tensor], optional: int, averaged: Sequence[torch.Tensor]) -> None:
        """Agree on what to send: state only once all ranks have it. All ranks compare when their tensors have changed."""
        kinds = kinds_of(drifting, optional, averaged)
        if kinds == self._kinds and self._agreed:
            return
        self._device = next((x.device for x in (*drifting, *averaged)), torch.device("cpu"))
        membership = [torch.empty(1 + self._nodes, dtype=NOTE)] if self._trailer else []
        always = drifting[: len(drifting) - optional]
        layouts = [lay_out([*x, *averaged, *membership], self._wire, parts=self._carriers) for x in (drifting, always)]
        told = self._comm.allgather_obj([layout.digest for layout in layouts])
        if who := odd([own[1] for own in told]):
            raise ReplicaError(f"parameters or followed buffers differ in number, shape or dtype: {who} from rank 0")
        self._kinds, self._agreed = kinds, not odd([own[0] for own in told])
        self._layout = layouts[0 if self._agreed else 1] if drifting or averaged else None
        self._count = len(drifting if self._agreed else always)
        if self._trailer and self._layout is not None:
            self._attendance.open()

    @property
    def _travelling(self) -> Kinds:
        """The kinds of what is sent now. State that some ranks do not have yet is not sent."""
        assert self._kinds is not None
        parameters, state, averaged = self._kinds
        return parameters, state if self._agreed else None, averaged

    @property
    def _trailer(self) -> int:
        """The number of our own tensors at the end of a message: step and membership.

        There are none if hosts gossip, nor on a GPU. NCCL needs every rank, so a message that arrives is the right one from a
        rank that takes part, and reading it would make the host wait for the device in every step.
        """
        return 1 if self._home is None and self._device.type == "cpu" else 0

    # ---- all together ----------------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to be dead or left out, or did not answer the last question."""
        return self._attendance.missing if self._home is None else ()

    def survivors(self) -> Communicator:
        """Return a communicator of the remaining ranks. They all call it, and ask each other, so that all know the same ones."""
        return self._call()[0]

    def _call(self) -> tuple[Communicator, bool, int]:
        if self._home is not None or self._nodes == 1:
            return self._comm, True, self._comm.size
        return self._attendance.call()

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make each tensor the mean over all ranks that took part. A rank that trained alone takes the mean over."""
        left, counts, counting = self._call()
        if counting < left.size:
            for x in tensors:
                x.mul_(left.size / counting) if counts else x.zero_()
        average_together(tensors, left)

    def spread(self, parameters: Sequence[torch.Tensor]) -> float:
        return spread(parameters, self.survivors())

    # ---- what the next step takes over ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next exchange, and what the pending one has sent and received. Waits for it."""
        transfer = self._transfer
        under_way: dict[str, torch.Tensor] = {}
        if transfer is not None:
            arrived = self._transfers.peek(transfer, self._attendance.patience) and self._is_message(transfer)
            sent, weight = transfer.sent.words.clone(), torch.tensor(transfer.partners.weight, dtype=torch.float64)
            under_way = {"sent": sent, "received": transfer.received.words.clone() if arrived else sent.clone(), "weight": weight}
        return {"round": self.round, "seats": self._nodes, "under_way": under_way or self._restored or {}}

    def _is_message(self, transfer: Transfer) -> bool:
        return not self._trailer or int(transfer.received.views[-1][0]) == transfer.step + 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. With another number of nodes only the replica's tensors are used, and rounds restart."""
        same = state["seats"] == self._nodes
        self.round = int(state["round"]) if same else 0
        self._restored = {name: x.clone() for name, x in state["under_way"].items()} or None if same else None

    def _take_restored(self) -> Transfer | None:
        """Return the exchange that was pending when the state was saved."""
        words, self._restored = self._restored, None
        layout = self._layout
        if words is None or layout is None or words["sent"].numel() != layout.nbytes // WORD.itemsize:
            return None
        # they were loaded to the host, but are mixed with tensors that may be on a GPU
        sent, received = Packet(layout, self._device), Packet(layout, self._device)
        who = Partners(None, None, float(words["weight"]) if "weight" in words else 0.5)  # older checkpoints only have halves
        transfer = Transfer(self.round - 1, who, sent, received, self._travelling)
        transfer.sent.words.copy_(words["sent"])
        transfer.received.words.copy_(words["received"])
        transfer.arrived = True
        if self._home is not None:
            self._gather_at_home(transfer)
        return transfer


def _crews(comm: Communicator) -> list[list[int]]:
    """Return the ranks of every host."""
    hosts = comm.allgather_obj(comm.inter_rank)
    return [[rank for rank, host in enumerate(hosts) if host == number] for number in range(comm.inter_size)]

"""Decides whether this rank still takes part, and with which others: what to do if it or its partners are late or dead.

`standing.decide` has the rules, and this file carries them out. While every exchange arrives, none of this communicates.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.verdict import name_ranks
from phalanx.grad.gossip import Gossip
from phalanx.grad.gossip.membership import Membership
from phalanx.grad.gossip.notices import REMEDY, Notices
from phalanx.grad.gossip.packet import Packet, lay_out
from phalanx.grad.gossip.partners import Partners, partners
from phalanx.grad.gossip.patience import Patience
from phalanx.grad.gossip.peers import Peers
from phalanx.grad.gossip.roll_call import roll_call
from phalanx.grad.gossip.standing import Hold, Leave, Place, Return, Word, decide, has_quorum, limit, unremarkable
from phalanx.grad.gossip.transfer import Transfer, Transfers

PAUSE = 0.2  # seconds between two attempts of a rank that is alone

Replica = Callable[[], list[torch.Tensor]]


class Attendance:
    """The membership, the round and the partners of one rank among `nodes`, which are ranks, or hosts whose ranks act as one."""

    def __init__(self, comm: Communicator, sync: Gossip, transfers: Transfers, nodes: int, me: int) -> None:
        self._comm, self._sync, self._transfers, self._me = comm, sync, transfers, me
        self.membership = Membership.of(nodes, sync.topology)
        self.round = 0  # of the next exchange
        self.steps = 0  # of the optimizer
        self.replica: Replica = list  # what a rank that fell behind takes over
        self._peers: Peers | None = None
        self._left = comm  # the ranks that answered the last roll call
        self._notices = Notices(comm)
        self._doubt: set[int] = set()  # partners whose message did not arrive
        self._met = 0  # the round after the last exchange that arrived
        self._tickets = 0
        self._patience = Patience(sync.patience)

    def open(self) -> None:
        """Open the side channel. All ranks call it before their first exchange, but not if hosts gossip, nor on GPUs."""
        if self._peers is None:
            self._peers = Peers(self._comm, self._transfers)
            weakref.finalize(self, self._peers.line.close)

    def start_from(self, round_: int) -> None:
        """Continue a resumed job from this round."""
        self.round = self._met = round_

    @property
    def patience(self) -> float:
        """Seconds to wait for a partner."""
        return self._patience.seconds

    def begin_step(self) -> None:
        """Note the time. If this rank was away for longer than the others wait, it has to ask for their round."""
        if self._patience.begin_step():
            self._doubt |= self._next_partners()

    # ---- one exchange ----------------------------------------------------------------------------------------------------------

    def partners(self) -> Partners:
        """Return the partners of the next exchange."""
        nodes = self.membership.nodes(self.round)
        if self._me not in nodes:
            self._notices.stop(f"the others found its connection broken and continue without it; {REMEDY}", [])
        return partners(self._me, nodes, self.round, self._sync)

    def waits_for(self, peer: int | None) -> int | None:
        """Return `peer`, or None if it does not take part now."""
        return None if peer is None or (self._peers is not None and self._peers.skips(peer, self.round)) else peer

    def _next_partners(self) -> set[int]:
        who = self.partners()
        return {peer for peer in map(self.waits_for, (who.dest, who.source)) if peer is not None}

    def landed(self, transfer: Transfer, told: Sequence[int]) -> None:
        """Process the outcome of a transfer, and the membership that came with it."""
        self._patience.waited += transfer.waited
        for peer in transfer.dead:
            self.membership = self.membership.mark_dead(peer, transfer.step)
        if transfer.arrived:
            self._met = transfer.step + 1
            self.membership = self.membership.merge(told)
        self._doubt |= transfer.late | transfer.jammed
        self._notices.missing(self.membership)

    def end_step(self) -> None:
        """Publish the state of this rank for others that ask, after the exchange has started."""
        if self._peers is not None:
            due = self._average_due(self.steps)
            self._peers.board.publish(round=self.round, steps=self.steps, leaves=self.membership.leaves, gathering=due)

    def _average_due(self, steps: int) -> bool:
        """Whether all ranks average after the step that mixes when `steps` are counted."""
        every = self._sync.average_every
        return every is not None and (steps + (self._sync.exchange == "gradients")) % every == 0

    # ---- catching up -----------------------------------------------------------------------------------------------------------

    def catch_up(self) -> bool:
        """Serve requests of others, and find out why messages are missing. Return False if this step has no exchange."""
        peers = self._peers
        if peers is None:
            return True
        if peers.board.busy:
            self.serve()
        if peers.skipped:
            peers.retry(self._place())
        doubt = {peer for peer in self._doubt if peer not in self.membership.gone}
        self._doubt = set()
        if not doubt:
            return True
        begun = time.monotonic()
        try:
            words, ended = peers.ask(doubt)
            if words.keys() == doubt and unremarkable(self._place(), words):
                return True
            return self._look_around(peers, doubt, words, ended)
        finally:
            self._patience.waited += time.monotonic() - begun

    def serve(self) -> None:
        """Give the replica to ranks that request it, and accept ranks that are back."""
        assert self._peers is not None
        wants, backs = self._peers.board.take()
        for back in backs:
            self._peers.welcome(back)
        for want in wants:
            tensors = self.replica()
            layout = lay_out(tensors, None)
            if want.rank in self.membership.gone:
                continue
            if layout.digest != want.digest:
                self._peers.ask([want.rank], ask="unlike", ticket=want.ticket)
                continue
            packet = Packet(layout, tensors[0].device)
            packet.pack(tensors)
            self._transfers.give(packet, want.rank, want.ticket)

    def _look_around(self, peers: Peers, asked: set[int], words: dict[int, Word], ended: frozenset[int]) -> bool:
        """Ask all other ranks too, and act on what `decide` returns. Stop training while this rank is alone."""
        until = time.monotonic() + self._comm.patience
        held = False
        while True:
            more, refused = peers.ask([rank for rank in self._place().others() if rank not in asked])
            words = {**words, **more}
            self._mark_dead(ended | refused)
            for word in words.values():
                if not word.leaves[self._me]:
                    self.membership = self.membership.merge(word.leaves)
            self._notices.missing(self.membership)
            place = self._place()
            action = decide(place, words)
            silent = frozenset(place.others()) - words.keys()
            if isinstance(action, Leave):
                self._notices.stop(
                    f"{name_ranks(action.by)} continued without it: it did not call average_(), spread() or survivors() within "
                    f"{self._comm.patience:g} s, or its connection broke; {REMEDY}",
                    action.by,
                )
            elif isinstance(action, Hold):
                if time.monotonic() > until:
                    self._notices.stop_as_minority(action.silent, self.membership)
                if not held:
                    held = True
                    self._notices.warn(
                        f"{name_ranks(action.silent)} do not answer, and the remaining ranks are not a majority of "
                        f"{self.membership.alive} ranks. "
                        f"This rank waits in round {self.round}, asks again for {self._comm.patience:g} s, and then stops"
                    )
                peers.skip(silent, silent)
                time.sleep(PAUSE)
                asked, words, ended = set(), {}, frozenset()
            elif isinstance(action, Return) and action.helpers and not self._adopt(peers, action):
                asked, words, ended = set(), {}, frozenset()
                if time.monotonic() > until:
                    self._notices.stop(
                        f"it is {action.behind} rounds behind, and no rank gave it its replica; {REMEDY}", action.helpers
                    )
            else:
                if held:
                    self._notices.warn(f"it reaches {name_ranks(sorted(words))} again")
                self._notices.skipped(action.skips - peers.skipped, words, self.round)
                peers.skip(action.skips, silent)
                return self._return(peers, action, words) if isinstance(action, Return) else True

    def _adopt(self, peers: Peers, action: Return) -> bool:
        """Take over the replica of one of the helpers."""
        tensors = self.replica()
        layout = lay_out(tensors, None)
        for helper in action.helpers[:2]:
            self._tickets += 1
            heard, _ = peers.ask([helper], ask="replica", ticket=self._tickets, digest=layout.digest)
            packet = Packet(layout, tensors[0].device)
            unlike = partial(peers.board.unlike, self._tickets)
            if heard and self._transfers.accept(packet, helper, self._tickets, self._comm.patience, unlike):
                packet.unpack(tensors)
                self._notices.rejoined(action.behind, helper)
                return True
            if unlike():
                self._notices.warn(
                    f"it is {action.behind} rounds behind, and keeps its replica: that of rank {helper} has another state"
                )
                return True
        return False

    def _return(self, peers: Peers, action: Return, words: dict[int, Word]) -> bool:
        """Move to the furthest round, and tell all. Return False if the others wait for all ranks, so that none exchanges."""
        if action.helpers:  # fetching the replica took time
            words = peers.ask(words)[0] or words
        exchanges = self._follow(max(words.values(), key=lambda word: word.round), adopted=bool(action.helpers))
        self._met = self.round
        self.end_step()
        passed = peers.tell_back(self.membership, self.round).values()
        if exchanges and passed:
            # they wait for this rank from that round on, but it may go further: to where they were when they got the message
            exchanges = self._follow(max(passed, key=lambda word: word.round), adopted=False)
        return exchanges

    def _follow(self, furthest: Word, *, adopted: bool) -> bool:
        """Take over round and steps of a rank that is ahead. Return False if it waits for all ranks, so that none exchanges."""
        if furthest.round < self.round + (not adopted):
            return True
        # go one round ahead: the others catch up with this rank, while it could not catch up with them; but not past an average
        sits_out = furthest.gathering and furthest.round > self.round
        ahead = 0 if sits_out or self._average_due(furthest.steps + 1) else 1
        self.steps = furthest.steps + (0 if sits_out else 1 + ahead)
        self.round = furthest.round + ahead
        return not sits_out

    def _mark_dead(self, ended: frozenset[int]) -> None:
        for rank in ended:
            self.membership = self.membership.mark_dead(rank, self.round)

    def _place(self) -> Place:
        return Place(self._me, self.round, self.membership)

    # ---- all together ----------------------------------------------------------------------------------------------------------

    def call(self) -> tuple[Communicator, bool, int]:
        """Return a communicator of the remaining ranks, whether this rank's replica counts in a mean, and how many do.

        A replica that trained alone for longer than two periods does not count, unless all did.
        """
        peers = self._peers
        alone = self.round - self._met > limit(self.membership) + 1
        if peers is not None:
            peers.board.publish(gathering=True, round=self.round, steps=self.steps)
        serve = self.serve if peers is not None else lambda: None
        called = roll_call(self._comm, self.membership, self.round, self._transfers.call_tag(), alone=alone, meanwhile=serve)
        self.membership, self.round = called.membership, called.step
        self._notices.missing(self.membership)
        left = [node for node in range(self._comm.size) if node not in self.membership.gone]
        if not has_quorum(left, self._comm.size, self.membership.dead):
            self._notices.stop_as_minority(
                [rank for rank in self.membership.gone if rank not in self.membership.dead], self.membership
            )
        if self._me not in left:
            self._notices.stop(f"the others did not wait for it any longer; {REMEDY}", [])
        if peers is not None:
            peers.everybody_met()
            self._doubt.clear()
            peers.board.publish(gathering=False, round=self.round, leaves=self.membership.leaves)
        if len(left) < self._left.size:
            self._left = self._comm.survivors(left)
        counting = [rank for rank in left if rank not in called.alone] or left
        if alone and self._me not in counting:
            self._notices.warn(
                f"it trained alone for {called.step - self._met} rounds, so its replica does not count in the mean of the others"
            )
        self._met = self.round
        return self._left, self._me in counting, len(counting)

    # ---- for the user ----------------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to be dead or left out, or did not answer the last question."""
        silent = self._peers.silent if self._peers is not None else frozenset()
        return tuple(sorted({*self.membership.gone, *silent}))

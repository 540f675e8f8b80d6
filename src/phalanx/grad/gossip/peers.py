"""One rank's peers: what it tells them about itself, which of them it does not wait for, and what they request.

The training thread writes, and asks if something is wrong. The hotline's thread only reads, and notes requests. Nothing here is
used while every exchange arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.comm.communicator import Communicator
from phalanx.grad.gossip.membership import Membership
from phalanx.grad.gossip.standing import Place, Word, limit
from phalanx.grad.gossip.transfer import Transfers, Unmatched

ASK = 0.5  # seconds in which a live process answers, even on a busy machine; other ranks are asked again later
RETRY = 5.0  # seconds after which a rank that does not take part is asked again


@dataclass(frozen=True, slots=True)
class Back:
    """Rank `rank` takes part again from `round` on. `unmatched` are its messages and receives that never matched ours."""

    rank: int
    round: int
    unmatched: Unmatched


@dataclass(frozen=True, slots=True)
class Want:
    """Rank `rank` requests this one's replica, if it has the same layout as its own."""

    rank: int
    ticket: int
    digest: str


class Board:
    """What the hotline's thread reads and writes. It does not refer to the gossiper, so that an optimizer can be collected."""

    def __init__(self, rank: int, nodes: int, transfers: Transfers) -> None:
        self._lock = threading.Lock()
        self._transfers = transfers
        self._word = Word(0, 0, False, (), (0,) * nodes)
        self._wants: list[Want] = []
        self._unlike: set[int] = set()  # tickets that were refused, because the replica has another layout
        self._backs: list[Back] = []
        self.rank = rank
        self.busy = False  # whether there are requests; the only thing that a step checks

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            said = self._word.to_answer()
            if question["ask"] == "where":
                return said
            who = int(question["from"])
            if question["ask"] == "unlike":
                self._unlike.add(int(question["ticket"]))
                return said
            if question["ask"] == "replica":
                self._wants.append(Want(who, int(question["ticket"]), str(question["digest"])))
            else:
                back = Back(who, int(question["round"]), Unmatched.of(question["unmatched"]))
                self._backs.append(back)
                said["unmatched"] = self._transfers.unmatched(who, back.round).to_answer()
            self.busy = True
            return said

    def publish(self, **changes: Any) -> None:
        with self._lock:
            self._word = replace(self._word, **changes)

    def unlike(self, ticket: int) -> bool:
        """Whether the rank that was asked for its replica has a different one."""
        return ticket in self._unlike

    def take(self) -> tuple[list[Want], list[Back]]:
        """Return the requests since the last call: ranks that want the replica, and ranks that are back."""
        with self._lock:
            wants, self._wants = self._wants, []
            backs, self._backs = self._backs, []
            self.busy = False
            return wants, backs


class Peers:
    """Asks the others, and remembers which of them not to wait for. All ranks of `comm` create it together."""

    def __init__(self, comm: Communicator, transfers: Transfers) -> None:
        self._comm, self._transfers = comm, transfers
        self.board = Board(comm.rank, comm.size, transfers)
        self.line = comm.hotline(self.board.answer)
        self.silent: frozenset[int] = frozenset()  # ranks that did not answer
        self._skips: frozenset[int] = frozenset()
        self._resume: dict[int, int] = {}  # the round from which a rank takes part again
        self._asked = 0.0  # when the skipped ranks were last asked
        self._near: set[int] = set()  # skipped ranks that a thread found to be near again

    # ---- whom not to wait for --------------------------------------------------------------------------------------------------

    def skips(self, peer: int, round_: int) -> bool:
        return peer in self._skips or round_ < self._resume.get(peer, 0)

    @property
    def skipped(self) -> frozenset[int]:
        return self._skips

    def skip(self, ranks: Collection[int], silent: Collection[int]) -> None:
        """Wait for all ranks except these from now on."""
        self._skips, self.silent = frozenset(ranks), frozenset(silent)
        self._asked = time.monotonic()
        self.board.publish(skips=tuple(sorted(self._skips)))

    def welcome(self, back: Back) -> None:
        """Accept a rank that takes part again, and match what was never matched."""
        self._transfers.match(back.rank, back.unmatched)
        self._resume[back.rank] = back.round
        self.skip(self._skips - {back.rank}, self.silent - {back.rank})

    def everybody_met(self) -> None:
        """Reset after all remaining ranks have done something together."""
        self._resume.clear()
        self.skip((), ())

    def retry(self, place: Place) -> None:
        """Ask the silent and late ranks again now and then, in the background: a network may heal without notice."""
        if self._near:
            near, self._near = self._near, set()
            self.skip(self._skips - near, self.silent - near)
        if not self._skips or time.monotonic() - self._asked < RETRY:
            return
        self._asked = time.monotonic()
        asked = self._skips

        def ask() -> None:
            words = self.ask(asked, RETRY / 2)[0]
            near = limit(place.membership)
            self._near = {rank for rank, word in words.items() if abs(word.round - place.round) <= near and not word.gathering}

        threading.Thread(target=ask, name="phalanx-retry", daemon=True).start()

    # ---- asking --------------------------------------------------------------------------------------------------------------

    def ask(self, ranks: Collection[int], seconds: float = ASK, **question: Any) -> tuple[dict[int, Word], frozenset[int]]:
        """Return the answers of these ranks, and which ranks have ended."""
        asked = {rank: {"ask": "where", "from": self._comm.rank, **question} for rank in ranks}
        answers = self.line.ask(asked, seconds)
        return {rank: Word.of(said) for rank, said in answers.words.items()}, answers.refused

    def tell_back(self, membership: Membership, round_: int) -> dict[int, Word]:
        """Tell all that this rank takes part from `round_` on, and match what was left over. Return their answers."""
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank and rank not in membership.gone]
        told = {"ask": "back", "from": self._comm.rank, "round": round_}
        left_over = {rank: self._transfers.unmatched(rank, round_).to_answer() for rank in others}
        answers = self.line.ask({rank: {**told, "unmatched": own} for rank, own in left_over.items()}, ASK)
        for rank, said in answers.words.items():
            self._transfers.match(rank, Unmatched.of(said["unmatched"]))
        return {rank: Word.of(said) for rank, said in answers.words.items()}

"""Warns the user of a gossiping rank about ranks that are missing, fell behind or are back, and explains why it stops."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from phalanx.comm.communicator import Communicator
from phalanx.comm.failure import CommunicationError
from phalanx.comm.verdict import name_ranks
from phalanx.grad.gossip.membership import Membership
from phalanx.grad.gossip.standing import Word

REMEDY = "check its host and network, and start the job again from a checkpoint"


class Notices:
    """Warnings and errors of one rank."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._reported: set[int] = set()  # ranks whose loss was already reported
        self._returns = 0

    def warn(self, text: str) -> None:
        warnings.warn(f"rank {self._comm.rank}: {text}", stacklevel=2)

    def missing(self, membership: Membership) -> None:
        """Warn once of every rank that is dead or left out."""
        new = [node for node in membership.gone if node not in self._reported]
        self._reported.update(new)
        if new:
            left = len(membership.leaves) - len(membership.gone)
            self.warn(
                f"{name_ranks(new)} cannot be reached any more; gossip continues with {left} of {len(membership.leaves)} ranks"
            )

    def skipped(self, new: Collection[int], words: Mapping[int, Word], round_: int) -> None:
        """Warn of ranks that gossip no longer waits for. `words` are the answers of those that answered."""
        silent = sorted(rank for rank in new if rank not in words)
        behind = sorted(rank for rank in new if rank in words and not words[rank].gathering)
        if silent:
            self.warn(f"{name_ranks(silent)} did not answer in round {round_}; gossip skips silent ranks until they are back")
        if behind:
            rounds = round_ - min(words[rank].round for rank in behind)
            self.warn(f"{name_ranks(behind)} fell {rounds} rounds behind; gossip skips late ranks until they are back")

    def rejoined(self, behind: int, helper: int) -> None:
        """Warn that this rank fell behind: the 1st, 2nd, 4th, 8th time, because for a slow rank it happens often."""
        self._returns += 1
        if self._returns & (self._returns - 1) == 0:
            self.warn(
                f"it was left behind by {behind} rounds. It takes over the replica of rank {helper} and takes part again"
                + (f" (for the {self._returns}th time)" if self._returns > 2 else "")
            )

    def stop_as_minority(self, silent: Sequence[int], membership: Membership) -> NoReturn:
        """Stop this rank because it reaches too few others."""
        here = membership.alive - len(silent)
        self.stop(
            f"it cannot reach {name_ranks(silent)}: {here} of {membership.alive} ranks are not a majority (half of them is, "
            f"with the lowest rank), and must not train alone; {REMEDY}",
            silent,
        )

    def stop(self, why: str, missing: Sequence[int]) -> NoReturn:
        """End this rank with an error. The others continue without it."""
        error = CommunicationError(f"rank {self._comm.rank}: gossip stops here: {why}", operation="gossip", missing=missing)
        self._comm.part()
        raise error

"""Turn a status of the core, and what the ranks reported, into an error that names ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.native import core
from phalanx.native.core import TYPES, Status
from phalanx.native.errors import Aborted, Call, RankDied, RankLate, Refused, SharedMemoryError, disagreement, ranks_text
from phalanx.native.meeting import sweep

TOPIC = 240  # bytes of a topic, which ranks exchange when they disagree


class Failures:
    """The failures of one team. `pids` are the processes of its ranks."""

    def __init__(self, team: Any, rank: int, size: int, timeout: float, pids: Sequence[int]) -> None:
        self._team, self._rank, self._size, self._timeout, self._pids = team, rank, size, timeout, pids
        self.topic: Callable[[], object] | None = None  # describes this rank's current call

    def error(self, number: int, call: str) -> RuntimeError:
        """Build the error for a nonzero status."""
        status = Status.of(number)
        author, dead, late, calls, refusal = self._team.failure()
        if status is Status.REFUSED:
            return Refused(f"{call}: {refusal}", author=author)
        if status is Status.DISAGREE:
            named = [Call(core._native.VERBS[verb], *rest) for verb, *rest in calls]
            return disagreement(call, author, named, self._tell_topics())
        told = "" if author == self._rank else f" (noticed by rank {author})"
        if status is Status.DEAD:
            sweep([self._pids[r] for r in dead])
            return RankDied(f"{call}: {ranks_text(dead)} ended or left{told}", author=author, dead=dead)
        if status is Status.LATE:
            return RankLate(f"{call}: {ranks_text(late)} did not come within {self._timeout:g} s{told}", author=author, late=late)
        why = "a signal handler raised" if status is Status.INTERRUPTED else "abort() was called"
        return Aborted(f"{call}: {why} on rank {author}", author=author, late=() if author == self._rank else (author,))

    def _tell_topics(self) -> list[str]:
        """Exchange topics after a disagreement. All ranks see it in the same operation, so all of them get here."""
        if self.topic is None:
            return []
        self._team.set_topic(0, 0)
        try:
            return self.tell(str(self.topic()))
        except SharedMemoryError:
            return []  # a rank died in the meantime: report no topics

    def tell(self, text: str) -> list[str]:
        """Collective: exchange texts with all ranks, at most TOPIC bytes each."""
        said = torch.zeros(self._size, TOPIC, dtype=torch.uint8)
        words = text.encode()[:TOPIC]
        said[self._rank, : len(words)] = torch.tensor(list(words), dtype=torch.uint8)
        status = self._team.all_gather(said.data_ptr(), said.numel(), TYPES[said.dtype])
        if status:
            author, dead, late, _, _ = self._team.failure()
            raise SharedMemoryError("tell()", author=author, dead=dead, late=late)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]

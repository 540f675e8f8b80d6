"""What can go wrong between ranks that share memory, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.native.core import OPS, TYPES


class SharedMemoryError(RuntimeError):
    """A collective that did not happen. `dead` ranks have ended or left, `late` ones did not come; `author` noticed."""

    def __init__(self, message: str, *, author: int, dead: Sequence[int] = (), late: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.author, self.dead, self.late = author, tuple(dead), tuple(late)


class RankDied(SharedMemoryError):  # noqa: N818  says what happened
    """A process ended, or closed the team. You cannot use the team any more."""


class RankLate(SharedMemoryError):  # noqa: N818  says what happened
    """A rank did not come within the timeout. You cannot use the team any more."""


class Aborted(SharedMemoryError):  # noqa: N818  says what happened
    """Rank `author` called abort(), or a signal handler raised there. You cannot use the team any more."""


class Disagreement(SharedMemoryError):  # noqa: N818  says what happened
    """Ranks called different things. Nothing was touched and the team still works; `late` are the odd ranks."""


class Refused(SharedMemoryError):  # noqa: N818  says what happened
    """Memory could not be shared. The team still works."""


class Call(NamedTuple):
    """What a rank called, as the core reports it after a disagreement."""

    verb: str
    kind: int
    op: int
    staged: int
    root: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    arena: int
    offset: int
    scale: float


def ranks_text(ranks: Sequence[int]) -> str:
    """For a sentence: "rank 3", or "ranks 1, 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def call_text(verb: str, x: torch.Tensor, op: str = "") -> str:
    """What was called, for errors: all_reduce(float32[1000], sum)."""
    return f"{verb}({str(x.dtype).removeprefix('torch.')}[{x.numel()}]{', ' + op if op else ''})"


def disagreement(call: str, author: int, calls: Sequence[Call], topics: Sequence[str] = ()) -> Disagreement:
    """The error that says which rank called what. The odd ranks are those outside the largest party.

    `topics` are what users called on each rank; where they differ they say more than what became of them here.
    """
    parties: dict[str, list[int]] = {}
    all_staged = all(each.staged for each in calls)
    for rank, each in enumerate(calls):
        parties.setdefault(_shown(each, all_staged), []).append(rank)
    if len(set(topics)) > 1:
        parties = {topic: [rank for rank in range(len(topics)) if topics[rank] == topic] for topic in topics}
    usual = max(parties.values(), key=len)
    odd = sorted(rank for ranks in parties.values() if ranks is not usual for rank in ranks)
    said = "; ".join(f"{ranks_text(ranks)}: {what}" for what, ranks in parties.items())
    return Disagreement(f"{call}: ranks disagree: {said}", author=author, late=odd)


def _shown(call: Call, all_staged: bool) -> str:
    if call.verb not in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        return f"{call.verb}({call.count or ''})"
    names = {number: str(dtype).removeprefix("torch.") for dtype, number in TYPES.items() if dtype is not torch.bool}
    how = {"broadcast": f", root {call.root}", "all_gather": ""}.get(call.verb, f", {list(OPS)[call.op]}")
    scaled = f" x {call.scale:g}" if call.scale != 1.0 else ""
    where = " in memory of its own" if call.staged else f" at byte {call.offset} of arena {call.arena}"
    return f"{call.verb}({names[call.kind]}[{call.count}]{how}{scaled}{'' if all_staged else where})"

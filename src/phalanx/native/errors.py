"""Errors of ranks that share memory, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.native.core import OPS, TYPES


class SharedMemoryError(RuntimeError):
    """A collective failed. `dead` ranks have ended or left, `late` ranks did not arrive; `author` noticed it."""

    def __init__(self, message: str, *, author: int, dead: Sequence[int] = (), late: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.author, self.dead, self.late = author, tuple(dead), tuple(late)


class RankDied(SharedMemoryError):  # noqa: N818  says what happened
    """A process ended or closed the team. The team is unusable."""


class RankLate(SharedMemoryError):  # noqa: N818  says what happened
    """A rank did not arrive within the timeout. The team is unusable."""


class Aborted(SharedMemoryError):  # noqa: N818  says what happened
    """Rank `author` called abort(), or a signal handler raised there. The team is unusable."""


class Disagreement(SharedMemoryError):  # noqa: N818  says what happened
    """Ranks made different calls. No data was touched and the team still works. `late` holds the odd ranks."""


class Refused(SharedMemoryError):  # noqa: N818  says what happened
    """Memory could not be shared. The team still works."""


class Call(NamedTuple):
    """What a rank called, as reported by the core after a disagreement."""

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
    """Ranks as text: "rank 3", or "ranks 1, 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def call_text(verb: str, x: torch.Tensor, op: str = "") -> str:
    """The call as text for errors: all_reduce(float32[1000], sum)."""
    return f"{verb}({str(x.dtype).removeprefix('torch.')}[{x.numel()}]{', ' + op if op else ''})"


def disagreement(call: str, author: int, calls: Sequence[Call], topics: Sequence[str] = ()) -> Disagreement:
    """Build the error that names what each rank called. The odd ranks are those outside the largest group that agrees.

    `topics` are the users' calls on each rank. If they differ, they explain more than the calls of the core.
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
    where = " in its own memory" if call.staged else f" at byte {call.offset} of arena {call.arena}"
    return f"{call.verb}({names[call.kind]}[{call.count}]{how}{scaled}{'' if all_staged else where})"

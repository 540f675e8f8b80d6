"""Size limits for schedules from files and command lines, so that a typo gives an error instead of exhausting memory.

Schedules that a program builds are limited only by its memory.
"""

from __future__ import annotations

import re
from fractions import Fraction

from .ops import Collective, Move, Op, Schedule, ScheduleError

MAX_RANKS = 65536  # torus:4000x8000 would fill the memory
MAX_CHUNKS = 1 << 20  # buffers are padded to a multiple of them
MAX_DIGITS = 18  # of a rank or a chunk
FACTOR_DIGITS = 100  # of the parts of a factor
MAX_NAME = 10_000  # characters of a name or a label: messages repeat them
MAX_LOWERED = 4_000_000  # messages; checking them takes about 10 s and 1 GB
MAX_WORK = 1 << 28  # slots that the checker touches; about 20 s

FACTOR = re.compile(r"-?\d{1,N}(?:/\d{1,N}|\.\d{1,N})?".replace("N", str(FACTOR_DIGITS)), re.ASCII)


def check_size(world: int, chunks: int) -> None:
    """Raise if a world or its buffers are larger than a file may ask for."""
    if world > MAX_RANKS:
        raise ScheduleError(f"a world of {world} ranks; at most {MAX_RANKS} are read from a file")
    if chunks > MAX_CHUNKS:
        raise ScheduleError(f"{chunks} chunks; at most {MAX_CHUNKS} are read from a file")


def check_name(text: str) -> str:
    """Return a name or label; raise if it is too long."""
    if len(text) > MAX_NAME:
        raise ScheduleError(f"a name or label of {len(text)} characters; at most {MAX_NAME} are read from a file")
    return text


def read_factor(text: str) -> Fraction:
    """Parse `1/2` or `0.5`. Digits are limited, because Fraction("1e1000000000") would fill the memory."""
    if not FACTOR.fullmatch(text):
        raise ScheduleError(f"factor {text[:40]!r} is not like 1/2, of at most {FACTOR_DIGITS} digits each")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ScheduleError(f"factor {text!r} divides by zero") from None


def work(s: Schedule) -> int:
    """An upper bound of the slots that the checker touches: all ranks' slots once, plus those of each op."""
    borders = {0}
    parts: set[tuple[range, int]] = set()
    for op in s.ops():
        for run in op.runs:
            borders.update((run.start, run.stop))
        if isinstance(op, Collective) and op.kind in ("reduce_scatter", "all_gather"):
            parts.add((op.chunks, len(op.group)))
    atoms = min(s.chunks, len(borders) + sum(size for _, size in parts))
    return s.world * atoms + sum(min(_ranks(op), s.world) * min(atoms, op.count) for op in s.ops())


def _ranks(op: Op) -> int:
    return 2 if isinstance(op, Move) else len(op.group) if isinstance(op, Collective) else len(op.ranks)

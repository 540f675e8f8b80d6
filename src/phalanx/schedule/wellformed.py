"""Well-formedness: what must hold for every step before checking its result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import pairwise
from numbers import Integral
from operator import attrgetter, eq
from typing import NoReturn, cast

from .describe import describe
from .ops import ONE, Chunks, Collective, Move, Op, Recode, Scale, Schedule, ScheduleError, Step

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
GOALS = ("sum", "mean", "mixing", "copy")
SMALLEST, LARGEST = Fraction(1, 2**126), Fraction(2**127)  # of a factor: the normal numbers of float32 and bfloat16
MOST_RANKS = 1 << 24  # the checker keeps a list per rank


def check(s: Schedule) -> None:
    """Raise `ScheduleError` if an op names something that does not exist, or two ops of a step conflict."""
    for _ in checked(s, s.steps):
        pass


def checked(s: Schedule, steps: Iterable[Step]) -> Iterator[Step]:
    """Check `s` as if it had these `steps`, and yield each when it has passed."""
    for name, number in (("world", s.world), ("chunks", s.chunks), ("root", s.root)):
        if not _whole(number):
            raise ScheduleError(f"{s.name}: {name} {number!r} is not a whole number")
    if s.world < 1 or s.chunks < 1:
        raise ScheduleError(f"{s.name}: world {s.world} and chunks {s.chunks} must both be at least 1")
    if s.goal not in GOALS:
        raise ScheduleError(f"{s.name}: goal {s.goal!r} is none of {', '.join(GOALS)}")
    if not 0 <= s.root < s.world:
        raise ScheduleError(f"{s.name}: root {s.root} is not a rank of a world of {s.world}")
    if s.world > MOST_RANKS:
        raise ScheduleError(f"{s.name}: a world of {s.world:,} ranks; the checker takes at most {MOST_RANKS:,}")
    known: dict[int, Chunks] = {}
    for number, step in enumerate(steps, start=1):
        if set(map(type, step.ops)) == {Move}:
            _check_moves(s, number, step, known)
        else:
            for op in step.ops:
                _check_op(s, number, op)
            if len(step.ops) > 1:
                _check_writers(s, number, step)
        yield step


def _check_moves(s: Schedule, number: int, step: Step, known: dict[int, Chunks]) -> None:
    """A fast version of `_check_op` and `_check_writers` for a correct step of moves."""
    moves = cast("tuple[Move, ...]", step.ops)
    sources, targets, chunks, factors = (list(map(attrgetter(name), moves)) for name in ("src", "dst", "chunks", "factor"))
    parts = dict(zip(map(id, chunks), chunks))  # by identity: lowered schedules share their ranges
    fresh = [part for key, part in parts.items() if key not in known]
    sound = (
        {*map(type, sources), *map(type, targets)} == {int}
        and min(sources) >= 0
        and min(targets) >= 0
        and max(sources) < s.world
        and max(targets) < s.world
        and not any(map(eq, sources, targets))
        and not any(map(_wrong, dict(zip(map(id, factors), factors)).values()))
        and all(_inside(part, s.chunks) for part in fresh)
    )
    if not sound:
        for move in moves:
            _check_op(s, number, move)
    known.update((id(part), part) for part in fresh)
    if len(set(targets)) < len(moves) and not all(m.reduce for m in moves):
        _check_writers(s, number, step)


def _wrong(factor: Fraction) -> str:
    """What is wrong with a factor, or an empty text."""
    if factor is ONE:
        return ""
    if not isinstance(cast(object, factor), Fraction):
        return f"the factor {factor!r} is not a Fraction"
    if factor < 0:
        return f"the factor {factor} is negative"
    if factor and not SMALLEST <= factor <= LARGEST:
        return "the factor is beyond what a float32 can hold: give one from 2^-126 to 2^127, or 0"
    return ""


def _check_op(s: Schedule, number: int, op: Op) -> None:
    def fail(fact: str) -> NoReturn:
        raise ScheduleError(f"{s.name}: {fact} (step {number}: {describe(op)})")

    if not isinstance(cast(object, op), (Move, Collective, Scale, Recode)):
        raise ScheduleError(f"{s.name}: {op!r:.80} is not a Move, Collective, Scale or Recode (step {number})")
    if not isinstance(op, Move) and not isinstance(cast(object, op.chunks), range):
        fail(f"chunks {op.chunks!r:.80} are not a range")
    if isinstance(op, Move | Scale) and (wrong := _wrong(op.factor)):
        fail(wrong)
    if isinstance(op, Move):
        ranks: Iterable[int] = (op.src, op.dst)
        if op.src == op.dst:
            fail(f"rank {op.src} sends to itself")
    elif isinstance(op, Collective):
        ranks = op.group
        for rank in ranks if isinstance(cast(object, ranks), (tuple, list)) else [ranks]:
            if not _whole(rank):
                raise ScheduleError(f"{s.name}: rank {rank!r:.80} of the group is not a whole number (step {number}: {op!r:.80})")
        if op.kind not in KINDS:
            fail(f"kind {op.kind!r} is none of {', '.join(KINDS)}")
        if not op.group:
            fail("the group is empty")
        if len(set(op.group)) < len(op.group):
            (twice, _), *_ = Counter(op.group).most_common(1)
            fail(f"rank {twice} is in the group twice")
        if op.kind in ("reduce_scatter", "all_gather") and len(op.chunks) % len(op.group):
            fail(f"{len(op.chunks)} chunks cannot be cut into {len(op.group)} equal parts")
    else:
        if not isinstance(cast(object, op.ranks), range):
            fail(f"ranks {op.ranks!r:.80} are not a range")
        if not op.ranks:
            fail("it names no rank")
        ranks = (op.ranks[0], op.ranks[-1])  # the ends are enough: a file may name a billion ranks
    for rank in ranks:
        if not _whole(rank):
            fail(f"rank {rank!r} is not a whole number")
        if not 0 <= rank < s.world:
            fail(f"rank {rank} is not in a world of {s.world}")
    if not _inside(op.chunks, s.chunks):
        fail(f"chunks {op.chunks} are not a non-empty run of the {s.chunks} chunks")


def _whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _inside(part: Chunks, chunks: int) -> bool:
    if isinstance(part, range):
        return part.step == 1 and 0 <= part.start < part.stop <= chunks
    runs = all(isinstance(cast(object, run), range) and _inside(run, chunks) for run in part)
    return runs and len(part) > 0 and all(left.stop <= right.start for left, right in pairwise(part))


def _check_writers(s: Schedule, number: int, step: Step) -> None:
    """Check that a slot has one writer per step, or only adding ones, and a rank one collective with its own slots."""
    member: dict[int, Collective] = {}
    writes: dict[int, list[tuple[int, int, bool, Op]]] = defaultdict(list)  # rank -> (start, stop, adds, op)
    for op in step.ops:
        if isinstance(op, Move):
            writes[op.dst] += [(run.start, run.stop, op.reduce, op) for run in op.runs]
        elif isinstance(op, Collective):
            for rank in op.group:
                if rank in member:
                    raise ScheduleError(
                        f"{s.name}: rank {rank} is in two collectives of one step"
                        f" (step {number}: {describe(member[rank])} and {describe(op)})"
                    )
                member[rank] = op
                writes[rank].append((op.chunks.start, op.chunks.stop, False, op))
        else:
            for rank in op.ranks:
                writes[rank].append((op.chunks.start, op.chunks.stop, False, op))
    for rank, entries in writes.items():
        if len(entries) > 1 and not all(adds for _, _, adds, _ in entries):
            _check_overlaps(s, number, rank, entries)


def _check_overlaps(s: Schedule, number: int, rank: int, entries: list[tuple[int, int, bool, Op]]) -> None:
    entries.sort(key=lambda entry: entry[:3])
    # the farthest end so far of an op that overwrites, and of one that adds
    plain_stop, adding_stop = 0, 0
    plain: Op | None = None
    adding: Op | None = None
    for start, stop, adds, op in entries:
        other = plain if start < plain_stop else adding if start < adding_stop and not adds else None
        if other is not None:
            raise ScheduleError(
                f"{s.name}: chunk {start} of rank {rank} is written twice in one step"
                f" (step {number}: {describe(other)} and {describe(op)})"
            )
        if adds and stop > adding_stop:
            adding_stop, adding = stop, op
        if not adds and stop > plain_stop:
            plain_stop, plain = stop, op

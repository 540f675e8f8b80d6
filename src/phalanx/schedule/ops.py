"""A collective algorithm as a value: a `Schedule` is a sequence of steps, each with `Move`, `Collective`, `Scale` and `Recode`.

Every rank holds one buffer, cut into `chunks` equal parts; a *slot* is one chunk of one rank. Steps happen one after the
other. The ops of one step happen together and read the state before the step. Two ops that write one slot in one step are an
error unless both add, and a rank is in at most one `Collective` per step.

There are two levels of op, because there are two kinds of engine: NCCL wants `Collective` (one library call by one group), gloo
and shared memory want `Move` (one message). `lower` turns the first into the second, and `verify` proves either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Chunks = range | tuple[range, ...]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"]
Goal = Literal["sum", "mean", "mixing", "copy"]
ONE = Fraction(1)  # one shared object, so that millions of moves can be checked by identity


class ScheduleError(ValueError):
    """A schedule that does not do what it claims. The message gives the facts.

    Example:
        >>> from dataclasses import replace
        >>> wrong = replace(phalanx.ring(2), steps=())
        >>> phalanx.schedule.verify(wrong)
        Traceback (most recent call last):
        phalanx.schedule.ops.ScheduleError: ring(2): chunk 0 of rank 0 ends as x0, wanted x0 + x1 (no step writes it)
    """


@dataclass(frozen=True, slots=True)
class Move:
    """One message: rank `src` sends `chunks` to rank `dst`.

    Args:
        src: The rank that sends.
        dst: The rank that receives.
        chunks: The chunks to send: a range, or several ranges (or chunk numbers) as one message. Ranges that touch become
            one, and several are kept as a sorted tuple.
        reduce: Add to the receiver's chunks instead of overwriting them.
        factor: Multiply what arrives by this exact fraction first. The sender keeps its own.
        coded: The chunks are encoded (see `Recode`), so only the code is sent. An encoded chunk that is added
            is decoded first; one that overwrites stays encoded.

    Example:
        >>> phalanx.schedule.Move(0, 1, range(4, 6), reduce=True)
        Move(src=0, dst=1, chunks=range(4, 6), reduce=True, factor=Fraction(1, 1), coded=False)
        >>> phalanx.schedule.Move(0, 1, [range(4, 6), 0, 1]).chunks
        (range(0, 2), range(4, 6))
    """

    src: int
    dst: int
    chunks: Chunks
    reduce: bool = False
    factor: Fraction = ONE
    coded: bool = False

    def __init__(  # same arguments as the generated one
        self,
        src: int,
        dst: int,
        chunks: Chunks,
        reduce: bool = False,  # noqa: FBT002
        factor: Fraction = ONE,
        coded: bool = False,  # noqa: FBT002
    ) -> None:
        _set_src(self, src)  # schedules have millions of moves: the generated __init__ takes 2.5 times as long
        _set_dst(self, dst)
        _set_chunks(self, chunks if type(chunks) is range else joined(chunks))
        _set_reduce(self, reduce)
        _set_factor(self, factor)
        _set_coded(self, coded)

    @property
    def runs(self) -> tuple[range, ...]:
        """The chunks as ranges."""
        return (self.chunks,) if isinstance(self.chunks, range) else self.chunks

    @property
    def count(self) -> int:
        """How many chunks are sent."""
        return len(self.chunks) if isinstance(self.chunks, range) else sum(map(len, self.chunks))


_set_src, _set_dst, _set_chunks, _set_reduce, _set_factor, _set_coded = (
    getattr(Move, name).__set__ for name in ("src", "dst", "chunks", "reduce", "factor", "coded")
)


@dataclass(frozen=True, slots=True)
class Collective:
    """One library call by the ranks of `group` on `chunks`.

    `reduce_scatter` and `all_gather` cut `chunks` into `len(group)` equal parts; part i belongs to `group[i]`. The root of
    `reduce` and `broadcast` is `group[0]`. Libraries leave different contents where a call promises nothing: in the other parts
    after a `reduce_scatter`, and in the non-roots after a `reduce`. A schedule must not read those.

    Args:
        kind: `"all_reduce"`, `"reduce_scatter"`, `"all_gather"`, `"reduce"` or `"broadcast"`.
        group: The ranks that take part, in order.
        chunks: The chunks they work on.

    Example:
        >>> phalanx.schedule.Collective("all_reduce", (0, 1, 2), range(6))
        Collective(kind='all_reduce', group=(0, 1, 2), chunks=range(0, 6))
    """

    kind: Kind
    group: tuple[int, ...]
    chunks: range

    @property
    def runs(self) -> tuple[range, ...]:
        """The chunks as ranges, as in a `Move`; always one."""
        return (self.chunks,)

    @property
    def count(self) -> int:
        """How many chunks it works on."""
        return len(self.chunks)


@dataclass(frozen=True, slots=True)
class Scale:
    """Every rank of `ranks` multiplies `chunks` of its own buffer by `factor`.

    Args:
        ranks: The ranks that scale.
        chunks: The chunks they scale.
        factor: An exact fraction.

    Example:
        >>> from fractions import Fraction
        >>> phalanx.schedule.Scale(range(4), range(1), Fraction(1, 2))
        Scale(ranks=range(0, 4), chunks=range(0, 1), factor=Fraction(1, 2))
    """

    ranks: range
    chunks: range
    factor: Fraction

    @property
    def runs(self) -> tuple[range, ...]:
        """The chunks as ranges, as in a `Move`; always one."""
        return (self.chunks,)

    @property
    def count(self) -> int:
        """How many chunks it works on."""
        return len(self.chunks)


@dataclass(frozen=True, slots=True)
class Recode:
    """Every rank of `ranks` encodes `chunks` of its own buffer, which rounds them, or decodes them.

    The code, for example 8 bits per number, is not part of the schedule. Encoded chunks can be sent and decoded, and
    nothing else: a sum needs full precision.

    Args:
        ranks: The ranks that encode or decode.
        chunks: The chunks they encode or decode.
        coded: Whether the chunks are encoded from then on, or in full precision.

    Example:
        >>> phalanx.schedule.Recode(range(4), range(1), coded=True)
        Recode(ranks=range(0, 4), chunks=range(0, 1), coded=True)
    """

    ranks: range
    chunks: range
    coded: bool

    @property
    def runs(self) -> tuple[range, ...]:
        """The chunks as ranges, as in a `Move`; always one."""
        return (self.chunks,)

    @property
    def count(self) -> int:
        """How many chunks it works on."""
        return len(self.chunks)


Op = Move | Collective | Scale | Recode


def joined(chunks: Iterable[range | int]) -> Chunks:
    """Sort ranges and single chunks and merge adjacent ones. Invalid ones are left for `verify` to reject."""
    parts = tuple(chunks) if isinstance(chunks, Iterable) else (chunks,)
    runs = [part if isinstance(part, range) else range(part, part + 1) for part in parts if isinstance(part, (int, range))]
    if len(runs) < len(parts) or not all(run.step == 1 and len(run) for run in runs):
        return parts  # type: ignore[return-value]
    found: list[range] = []
    for run in sorted(runs, key=lambda run: run.start):
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found[0] if len(found) == 1 else tuple(found)


@dataclass(frozen=True, slots=True)
class Step:
    """Ops that happen together. They all read the state before the step.

    Args:
        ops: The ops of this step.
        label: A few words for people.

    Example:
        >>> [step.label for step in phalanx.torus(2, 3).steps]
        ['reduce-scatter along rows', 'all-reduce along columns', 'all-gather along rows']
    """

    ops: tuple[Op, ...]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective algorithm as a value: `steps` for `world` ranks, and a claim about the result.

    The claim, `goal`, is the weight that the input of rank j has in every slot of rank i at the end:

    - `"sum"`: 1.
    - `"mean"`: 1 / world.
    - `"mixing"`: any doubly stochastic matrix. This is what a round of gossip does.
    - `"copy"`: 1 for rank `root` and 0 for all others. This is a broadcast.

    Args:
        name: What to call it in messages.
        world: The number of ranks.
        chunks: The number of equal parts of each rank's buffer.
        steps: What happens, in order.
        goal: The claim, which `phalanx.schedule.verify` proves.
        root: The rank that a `"copy"` starts from.

    Example:
        >>> s = phalanx.torus(2, 3)
        >>> s.world, s.chunks, len(s.steps), s.goal
        (6, 6, 3, 'sum')
    """

    name: str
    world: int
    chunks: int
    steps: tuple[Step, ...]
    goal: Goal = "sum"
    root: int = 0

    def ops(self) -> Iterator[Op]:
        """Every op, in step order."""
        for step in self.steps:
            yield from step.ops

    def _repr_html_(self) -> str:
        """The interactive viewer, for notebooks."""
        from .viewer import notebook  # it needs the checker, which needs this file

        return notebook(self)

    @property
    def lowered(self) -> bool:
        """Whether the schedule has no `Collective` left, only `Move`, `Scale` and `Recode`."""
        return not self._has(Collective)

    @property
    def coded(self) -> bool:
        """Whether some chunks are sent encoded, so that the result is rounded."""
        return self._has(Recode)

    def _has(self, kind: type[Op]) -> bool:
        return any(kind in set(map(type, step.ops)) for step in self.steps)  # in C, because there may be millions

"""The memory of GPUs in MSCCL and MSCCL++ programs, on symbols: record which chunk went where, and pack that into few steps.

Both have a scratch buffer and local additions; a schedule has neither. So the contents of scratch are recorded by their origin, a
chunk of some rank at some time. They become a message when they are added to, or copied into, the buffer itself. That message
replaces both: the schedule adds when it arrives.

Which messages may share a step follows from the chunks alone. A chunk's life has *epochs*: a copy starts one, and so does an
addition after the chunk has been read; further additions belong to the same epoch, in any order. A message comes after all
writers of the epoch that it reads, and not after the writers of the next one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from .ops import Move, ScheduleError, Step, joined


@dataclass(eq=False, slots=True)
class Epoch:
    """A chunk of a rank between two changes that an op could notice."""

    rank: int
    chunk: int
    before: Epoch | None = None
    writers: list[int] = field(default_factory=list)  # messages, the first a copy if `copied`
    copied: bool = False
    readers: list[int] = field(default_factory=list)
    read: bool = False  # by a message in flight, or kept in scratch


@dataclass(frozen=True, slots=True)
class _Message:
    source: Epoch
    target: Epoch
    reduce: bool


Value = list[Epoch]  # a sum
DEEPEST = 10_000  # steps
MOST_TERMS = 1 << 24  # of sums in scratch, over the whole program: a sum that is added to itself 40 times has 2**40


class Memory:
    """What the buffers of all GPUs hold. Raises ValueError for what a schedule cannot do."""

    def __init__(self, chunks: int, *, in_place: bool) -> None:
        self.chunks = chunks
        self.in_place = in_place
        self.now: dict[tuple[int, int], Epoch] = {}
        self.holds: dict[tuple[int, int], str] = {}  # the buffers, of i and o, that hold a chunk as it is now; at first i
        self.stale: set[tuple[int, int]] = set()  # chunks that hold a sum where the program keeps the old value
        self.scratch: dict[tuple[int, int], Value] = {}
        self.terms = 0
        self.messages: list[_Message] = []

    def read(self, rank: int, place: tuple[str, int], count: int) -> list[Value]:
        return [self.read_one(rank, place[0], place[1] + i) for i in range(count)]

    def read_one(self, rank: int, buffer: str, chunk: int) -> Value:
        if buffer == "s":
            if (rank, chunk) not in self.scratch:
                raise ValueError(f"reads chunk {chunk} of scratch, which has not been written")
            return self.counted(self.scratch[rank, chunk])
        self.check_current(rank, buffer, chunk)
        epoch = self.epoch(rank, chunk)
        epoch.read = True
        return [epoch]

    def check_current(self, rank: int, buffer: str, chunk: int) -> None:
        """Raise if a chunk of the input or output does not exist, or a schedule has overwritten it by now."""
        self.check(rank, buffer, chunk)
        if (rank, chunk) in self.stale or (not self.in_place and buffer not in self.holds.get((rank, chunk), "i")):
            raise ValueError(f"reads the old value of chunk {chunk}, which a schedule does not keep")

    def write(self, rank: int, place: tuple[str, int], values: list[Value], *, reduce: bool) -> None:
        for chunk, value in enumerate(values, start=place[1]):
            if place[0] == "s":
                if reduce and (rank, chunk) not in self.scratch:
                    raise ValueError(f"adds to chunk {chunk} of scratch, which has not been written")
                self.scratch[rank, chunk] = self.counted([*(self.scratch[rank, chunk] if reduce else []), *value])
            else:
                self.write_one(rank, place[0], chunk, value, reduce=reduce)

    def counted(self, value: Value) -> Value:
        self.terms += len(value)
        if self.terms > MOST_TERMS:
            raise ValueError(f"the sums in scratch have more than {MOST_TERMS:,} terms")
        return list(value)

    def add(self, rank: int, old: tuple[str, int], target: tuple[str, int], values: list[Value]) -> None:
        """Write what is in `old`, plus `values`, to `target`: the same place, or another one."""
        if old == target or (old[1] == target[1] and "s" not in (old[0], target[0])):
            for chunk in range(old[1], old[1] + len(values)) if old[0] != "s" else ():
                self.check_current(rank, old[0], chunk)
            self.write(rank, target, values, reduce=True)
        else:
            held = self.read(rank, old, len(values))
            self.write(rank, target, [[*a, *b] for a, b in zip(held, values, strict=True)], reduce=False)

    def write_one(self, rank: int, buffer: str, chunk: int, value: Value, *, reduce: bool) -> None:
        self.check(rank, buffer, chunk)
        if not reduce and self.epoch(rank, chunk) in value:  # the chunk and others: the others are added to it
            value, reduce = list(value), True
            value.remove(self.epoch(rank, chunk))
        holding = self.holds.get((rank, chunk), "i")
        copied = not value and (rank, chunk) not in self.stale  # from one buffer to the other: then both hold it
        self.holds[rank, chunk] = buffer if not copied else holding if buffer in holding else "io"
        for source in value:
            if source.chunk != chunk:
                raise ValueError(
                    f"puts chunk {source.chunk} in the place of chunk {chunk}; chunks of a schedule keep their places"
                )
            if source.rank == rank:
                raise ValueError(f"adds or copies its own chunk {chunk}, which a schedule cannot do")
            target = self.epoch(rank, chunk)
            if target.read or not reduce:
                target = self.now[rank, chunk] = Epoch(rank, chunk, before=target, copied=not reduce)
            target.writers.append(len(self.messages))
            source.readers.append(len(self.messages))
            self.messages.append(_Message(source, target, reduce))
            reduce = True
        self.stale.discard((rank, chunk))

    def check_end(self, name: str, world: int) -> None:
        """Raise if the output of a GPU is not what the schedule leaves there."""
        if self.stale:
            rank, chunk = min(self.stale)
            raise ScheduleError(f"{name}: gpu {rank} sends a sum of chunk {chunk} on and never stores it; a schedule would")
        arrived = sum("o" in buffers for buffers in self.holds.values())
        if not self.in_place and arrived < world * self.chunks:
            raise ScheduleError(f"{name}: {arrived} of {world * self.chunks} chunks are in the output at the end")

    def epoch(self, rank: int, chunk: int) -> Epoch:
        return self.now.setdefault((rank, chunk), Epoch(rank, chunk))

    def check(self, rank: int, buffer: str, chunk: int) -> None:
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} of buffer {buffer} is not one of {self.chunks}")


def steps_of(name: str, messages: list[_Message]) -> tuple[Step, ...]:
    """The messages, each in the earliest possible step; those of one pair are sent together."""
    level = _levels(name, messages)
    steps: list[dict[tuple[int, int, bool], set[int]]] = [defaultdict(set) for _ in range(max(level, default=-1) + 1)]
    for number, m in enumerate(messages):
        sent = steps[level[number]][m.source.rank, m.target.rank, m.reduce]
        if m.target.chunk in sent:
            raise ScheduleError(
                f"{name}: gpu {m.target.rank} adds chunk {m.target.chunk} of gpu {m.source.rank} twice, which no sum needs"
            )
        sent.add(m.target.chunk)
    return tuple(
        Step(tuple(Move(src, dst, joined(chunks), reduce) for (src, dst, reduce), chunks in sorted(step.items())))
        for step in steps
    )


def _levels(name: str, messages: list[_Message]) -> list[int]:
    """The earliest steps for which every message reads what it should: longest paths, by relaxation."""
    follow: list[list[tuple[int, int]]] = [[] for _ in messages]  # message -> (a later one, the least steps between them)
    for number, m in enumerate(messages):
        for writer in m.source.writers:
            follow[writer].append((number, 1))
        target, earlier = m.target, m.target.before
        if target.copied and number != target.writers[0]:
            follow[target.writers[0]].append((number, 1))
        if earlier is not None:
            for reader in earlier.readers:
                follow[reader].append((number, 0))
            for writer in earlier.writers:
                follow[writer].append((number, 1))
    level, todo, queued = [0] * len(messages), deque(range(len(messages))), [True] * len(messages)
    while todo:
        number = todo.popleft()
        queued[number] = False
        if level[number] > min(len(messages), DEEPEST):
            m = messages[number]
            raise ScheduleError(
                f"{name}: chunk {m.target.chunk} of gpu {m.source.rank} is changed before gpu {m.target.rank} has added what"
                " it got; a schedule has no scratch to keep it"
            )
        for other, apart in follow[number]:
            if level[other] < level[number] + apart:
                level[other] = level[number] + apart
                if not queued[other]:
                    queued[other] = True
                    todo.append(other)
    return level

"""From MSCCL to a schedule: run the program on symbols, note which chunk went where, and put that into as few steps as possible.

MSCCL has a scratch buffer and local additions; a schedule has neither. What lies in scratch is therefore remembered as what it
is, a chunk of some rank at some time, and becomes a message when it is added to, or copied into, the buffer itself. The
message then takes the place of both: the schedule adds when it arrives.

Which message may share a step with which follows from the chunks alone. A chunk's life has *epochs*: a copy begins one, and so
does an addition after somebody has read it; further additions belong to the same epoch, in any order. A message comes after
all writers of the epoch that it reads, and not after the writers of the next one."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from .msccl_xml import RECEIVES, SENDS, Algorithm, Instruction, parse
from .ops import Move, Schedule, ScheduleError, Step, joined


@dataclass(eq=False, slots=True)
class Epoch:
    """A chunk of a rank between two changes that somebody could notice."""

    rank: int
    chunk: int
    before: Epoch | None = None
    writers: list[int] = field(default_factory=list)  # messages, the first a copy if `copied`
    copied: bool = False
    readers: list[int] = field(default_factory=list)
    read: bool = False  # by a message that is under way, or kept in scratch


@dataclass(frozen=True, slots=True)
class _Message:
    source: Epoch
    target: Epoch
    reduce: bool


Value = list[Epoch]  # a sum
DEEPEST = 10_000  # steps


def from_msccl(xml: str | bytes) -> Schedule:
    """Read an all-reduce in the XML of MSCCL. `verify` says whether it is right.

    Channels, thread blocks and instances only say who does the work, so the schedule has none. A message into scratch that is
    added later is one message that adds. Scratch that is sent on becomes a message from the rank that it came from.

    Args:
        xml: What msccl-tools wrote: `send`, `recv`, their fused forms, `copy`, `reduce` and `nop` steps.

    Returns:
        The schedule, with as few steps as its messages allow.

    Raises:
        ScheduleError: If the text is not such an algorithm, waits for ever, or keeps in scratch what a schedule cannot.

    Example:
        >>> s = phalanx.schedule.swing(4)
        >>> again = phalanx.schedule.from_msccl(phalanx.schedule.to_msccl(s))
        >>> phalanx.schedule.verify(again)
        >>> phalanx.schedule.sent(again) == phalanx.schedule.sent(s)
        True
    """
    algorithm = parse(xml)
    if algorithm.collective not in ("allreduce", "all_reduce"):
        raise ScheduleError(f"{algorithm.name}: coll={algorithm.collective[:40]!r}; only allreduce is read")
    machine = _Machine(algorithm)
    machine.run()
    return Schedule(algorithm.name, len(algorithm.gpus), algorithm.chunks, _steps(algorithm.name, machine.messages))


class _Machine:
    """All GPUs at work: every thread block does a step if it can, again and again."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.now: dict[tuple[int, int], Epoch] = {}
        self.through: dict[tuple[int, int], str] = {}  # the buffer, i or o, through which a chunk was last written
        self.stale: set[tuple[int, int]] = set()  # chunks that hold a sum where MSCCL keeps the old value
        self.scratch: dict[tuple[int, int], Value] = {}
        self.queues: dict[tuple[int, int, int], deque[list[Value]]] = defaultdict(deque)
        self.messages: list[_Message] = []
        self.done = [[0] * len(blocks) for blocks in algorithm.gpus]

    def run(self) -> None:
        waiting = [(rank, block) for rank, blocks in enumerate(self.algorithm.gpus) for block in blocks if block.steps]
        while waiting:
            before = [list(row) for row in self.done]  # what is done in a turn counts in the next
            progress = False
            for rank, block in waiting:
                at = before[rank][block.number]
                step = block.steps[at]
                if step.after is not None:
                    other, number = step.after
                    if other >= len(before[rank]) or number >= len(self.algorithm.gpus[rank][other].steps):
                        raise self.fail(
                            rank, block.number, at, f"waits for step {number} of thread block {other}, which is not there"
                        )
                    if before[rank][other] <= number:
                        continue
                incoming = self.queues[block.receive, rank, block.channel] if step.kind in RECEIVES else None
                if incoming is not None and not incoming:
                    continue
                self.do(
                    rank,
                    block.number,
                    at,
                    step,
                    block.send,
                    block.receive,
                    block.channel,
                    incoming.popleft() if incoming else None,
                )
                self.done[rank][block.number] += 1
                progress = True
            waiting = [(rank, block) for rank, block in waiting if self.done[rank][block.number] < len(block.steps)]
            if not progress and waiting:
                rank, block = waiting[0]
                raise self.fail(rank, block.number, self.done[rank][block.number], "waits for ever, as all others do")
        for (source, target, channel), queue in self.queues.items():
            if queue:
                raise ScheduleError(f"{self.algorithm.name}: gpu {target} never receives what {source} sent on channel {channel}")

    def do(
        self, rank: int, block: int, at: int, step: Instruction, send: int, receive: int, channel: int, came: list[Value] | None
    ) -> None:
        kind = step.kind
        if kind == "nop":
            return
        try:
            if kind in SENDS and not 0 <= send < len(self.algorithm.gpus):
                raise ValueError(f"sends to gpu {send}")
            if came is not None and len(came) != step.count:
                raise ValueError(f"receives {step.count} chunks, but {len(came)} were sent")
            if kind in ("cpy", "re"):
                came = self.read(rank, step.source, step.count)
            elif kind == "rrs":  # the sum is not kept; a schedule keeps it, so nobody may read the old value again
                places = [(rank, step.source[1] + i) for i in range(step.count)] if step.source[0] != "s" else []
                self.write(rank, step.source, came or [], reduce=True)
                self.queues[rank, send, channel].append(self.read(rank, step.source, step.count))
                self.stale.update(places)
                return
            if came is not None:
                self.write(rank, step.target, came, reduce=kind in ("re", "rrc", "rrcs"))
            if kind in SENDS:
                place = step.source if kind == "s" else step.target
                self.queues[rank, send, channel].append(self.read(rank, place, step.count))
        except ValueError as error:
            raise self.fail(rank, block, at, str(error)) from None

    def read(self, rank: int, place: tuple[str, int], count: int) -> list[Value]:
        return [self.read_one(rank, place[0], place[1] + i) for i in range(count)]

    def read_one(self, rank: int, buffer: str, chunk: int) -> Value:
        if buffer == "s":
            if (rank, chunk) not in self.scratch:
                raise ValueError(f"reads chunk {chunk} of scratch, which nobody has written")
            return list(self.scratch[rank, chunk])
        self.check(rank, buffer, chunk)
        if (rank, chunk) in self.stale or (not self.algorithm.in_place and self.through.get((rank, chunk), "i") != buffer):
            raise ValueError(f"reads the old value of chunk {chunk}, which a schedule does not keep")
        epoch = self.epoch(rank, chunk)
        epoch.read = True
        return [epoch]

    def write(self, rank: int, place: tuple[str, int], values: list[Value], *, reduce: bool) -> None:
        for chunk, value in enumerate(values, start=place[1]):
            if place[0] == "s":
                if reduce and (rank, chunk) not in self.scratch:
                    raise ValueError(f"adds to chunk {chunk} of scratch, which nobody has written")
                self.scratch[rank, chunk] = [*(self.scratch[rank, chunk] if reduce else []), *value]
            else:
                self.write_one(rank, place[0], chunk, value, reduce=reduce)

    def write_one(self, rank: int, buffer: str, chunk: int, value: Value, *, reduce: bool) -> None:
        self.check(rank, buffer, chunk)
        self.through[rank, chunk] = buffer
        if not reduce and [(e.rank, e.chunk) for e in value] == [(rank, chunk)] and value[0] is self.epoch(rank, chunk):
            return  # a copy onto itself, between the two buffers of an algorithm that is not in place
        for source in value:
            if source.chunk != chunk:
                raise ValueError(
                    f"puts chunk {source.chunk} in the place of chunk {chunk}; chunks of a schedule keep their places"
                )
            if source.rank == rank:
                raise ValueError(f"adds or copies its own chunk {chunk}, which a schedule cannot")
            target = self.epoch(rank, chunk)
            if target.read or not reduce:
                target = self.now[rank, chunk] = Epoch(rank, chunk, before=target, copied=not reduce)
            target.writers.append(len(self.messages))
            source.readers.append(len(self.messages))
            self.messages.append(_Message(source, target, reduce))
            reduce = True
        self.stale.discard((rank, chunk))

    def epoch(self, rank: int, chunk: int) -> Epoch:
        return self.now.setdefault((rank, chunk), Epoch(rank, chunk))

    def check(self, rank: int, buffer: str, chunk: int) -> None:
        if not 0 <= chunk < self.algorithm.chunks:
            raise ValueError(f"chunk {chunk} of buffer {buffer} is not one of {self.algorithm.chunks}")

    def fail(self, rank: int, block: int, step: int, fact: str) -> ScheduleError:
        return ScheduleError(f"{self.algorithm.name}: gpu {rank}, thread block {block}, step {step}: {fact}")


def _steps(name: str, messages: list[_Message]) -> tuple[Step, ...]:
    """The messages, each in the first step that it can be in; those of one pair travel together."""
    level = _levels(name, messages)
    steps: list[dict[tuple[int, int, bool], list[int]]] = [defaultdict(list) for _ in range(max(level, default=-1) + 1)]
    for number, m in enumerate(messages):
        steps[level[number]][m.source.rank, m.target.rank, m.reduce].append(m.target.chunk)
    return tuple(
        Step(tuple(Move(src, dst, joined(chunks), reduce) for (src, dst, reduce), chunks in sorted(step.items())))
        for step in steps
    )


def _levels(name: str, messages: list[_Message]) -> list[int]:
    """The earliest steps for which every message reads what it should: longest paths, by relaxation."""
    follow: list[list[tuple[int, int]]] = [[] for _ in messages]  # message -> (a later one, steps between them at least)
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

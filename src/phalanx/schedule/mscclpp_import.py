"""Import a schedule from MSCCL++: run the thread blocks on symbols, and pack what they do into as few steps as possible.

MSCCL++ is one-sided: a GPU writes into the memory of another one, and only signals say when. A plan that forgets a signal works
only sometimes. So every thread block has a vector clock, which signals carry. If two accesses reach one chunk and one of them
writes, the clocks must show which comes first. Otherwise the plan is refused."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from .msccl_memory import Memory, Value, steps_of
from .mscclpp_plan import PUTS, REDUCES, Channel, Operation, Place, Plan, parse_plan
from .ops import Schedule, ScheduleError

Clock = dict[int, int]  # thread block -> how many of its operations are known to be done
MOST_COMPARED = 1 << 24  # entries of clocks that signals and barriers carry; they may take 600 MB


def from_mscclpp(text: str | bytes) -> Schedule:
    """Read an all-reduce in the JSON of MSCCL++. Use `verify` to check it.

    Thread blocks and channels only describe who does the work, so the schedule has none. A message into scratch that is added
    later becomes one message that adds. A plan in which two accesses to a chunk race is refused.

    Args:
        text: An execution plan of the protocol `"Simple"`: `put`, `get`, `copy`, the four reductions, signals, semaphores and
            barriers. Packets, switch channels, pipelines and groups of thread blocks are refused.

    Returns:
        The schedule, with as few steps as its messages allow.

    Raises:
        ScheduleError: If the text is not such a plan, deadlocks, races, or does what a schedule cannot do.

    Example:
        >>> s = phalanx.schedule.swing(4)
        >>> again = phalanx.schedule.from_mscclpp(phalanx.schedule.to_mscclpp(s))
        >>> phalanx.schedule.verify(again)
        >>> phalanx.schedule.sent(again) == phalanx.schedule.sent(s)
        True
    """
    plan = parse_plan(text)
    machine = _Machine(plan)
    machine.run()
    machine.memory.check_end(plan.name, len(plan.gpus))
    return Schedule(plan.name, len(plan.gpus), plan.chunks, steps_of(plan.name, machine.memory.messages))


@dataclass(slots=True)
class _Block:
    """The state of a thread block."""

    rank: int
    number: int
    identity: int
    operations: tuple[Operation, ...]
    at: int = 0
    taken: int = 0  # signals that the next operation waits for and already has
    clock: Clock = field(default_factory=dict)


@dataclass(slots=True)
class _Queue:
    """The signals on a channel, or releases of a semaphore, that nobody has taken, and the thread blocks that wait for one."""

    clocks: deque[Clock] = field(default_factory=deque)
    waiting: list[_Block] = field(default_factory=list)


@dataclass(slots=True)
class _Accesses:
    """Who last wrote a chunk of a buffer, and who has read it since: thread block and operation."""

    written: tuple[int, int] | None = None
    read: dict[int, int] = field(default_factory=dict)


class _Machine:
    """Simulates all GPUs: every thread block runs until it waits, and again when it has what it waits for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory = Memory(plan.chunks, in_place=plan.in_place)
        self.blocks = [
            _Block(rank, number, 0, operations)
            for rank, blocks in enumerate(plan.gpus)
            for number, operations in enumerate(blocks)
        ]
        for identity, block in enumerate(self.blocks):
            block.identity, block.clock = identity, {identity: 0}
        self.ready = deque(block for block in self.blocks if block.operations)
        self.signals: dict[Channel, _Queue] = defaultdict(_Queue)
        self.semaphores: dict[tuple[int, int], _Queue] = defaultdict(_Queue)
        for (rank, i), times in self.acquired().items():  # a million at the beginning, of which it takes two, are two
            self.semaphores[rank, i].clocks.extend([{}] * min(times, plan.semaphores[rank][i]))
        self.meetings: dict[tuple[int, int], list[_Block]] = defaultdict(list)  # gpu and barrier -> who waits there
        self.accesses: dict[tuple[int, str, int], _Accesses] = defaultdict(_Accesses)
        self.compared = 0

    def acquired(self) -> Counter[tuple[int, int]]:
        """How often the plan takes each semaphore."""
        taking = [(block.rank, op.numbers) for block in self.blocks for op in block.operations if op.kind == "sem_acquire"]
        return Counter((rank, number) for rank, numbers in taking for number in numbers)

    def run(self) -> None:
        while self.ready:
            block = self.ready.popleft()
            while block.at < len(block.operations) and self.can_do(block):
                block.at += 1
        for block in self.blocks:
            if block.at < len(block.operations):
                raise self.fail(block, "deadlocks with all others")
        for (source, target, _, number), queue in self.signals.items():
            if queue.clocks:
                raise ScheduleError(
                    f"{self.plan.name}: gpu {target} never waits for a signal of gpu {source} on their channel {number}"
                )

    def can_do(self, block: _Block) -> bool:
        """Do the next operation of a thread block, unless it has to wait."""
        op = block.operations[block.at]
        if op.kind in ("wait", "sem_acquire"):
            return self.take(block, op)
        if op.kind == "barrier":
            return self.meet(block, *op.numbers)
        block.clock[block.identity] = block.at + 1
        try:
            self.do(block, op)
        except ScheduleError:
            raise
        except ValueError as error:
            raise self.fail(block, str(error)) from None
        if op.kind == "sem_release":
            for number in op.numbers:
                self.give(block, self.semaphores[block.rank, number])
        for channel in op.channels:  # a signal, or a put that signals
            self.give(block, self.signals[channel])
        return True

    def give(self, block: _Block, queue: _Queue) -> None:
        self.compare(len(block.clock))
        queue.clocks.append(dict(block.clock))
        if queue.waiting:
            self.ready.append(queue.waiting.pop())

    def take(self, block: _Block, op: Operation) -> bool:
        """Take a signal of each channel, or a release of each semaphore, in order; wait at the first that has none."""
        while block.taken < len(op.channels or op.numbers):
            if op.kind == "wait":
                mine, peer, kind, number = op.channels[block.taken]
                queue = self.signals[peer, mine, kind, number]
            else:
                queue = self.semaphores[block.rank, op.numbers[block.taken]]
            if not queue.clocks:
                queue.waiting.append(block)
                return False
            _learn(block.clock, queue.clocks.popleft())
            block.taken += 1
        block.taken = 0
        return True

    def meet(self, block: _Block, barrier: int, count: int) -> bool:
        """Wait for the other thread blocks of a barrier. The last one wakes them, and all know what each of them knew."""
        block.clock[block.identity] = block.at + 1
        met = self.meetings[block.rank, barrier]
        met.append(block)
        wanted = met[0].operations[met[0].at].numbers[1]
        if wanted != count:
            raise self.fail(block, f"barrier {barrier} is for {count} thread blocks here, and for {wanted} in another")
        if len(met) < count:
            return False
        known: Clock = {}
        for other in met:
            self.compare(len(other.clock))
            _learn(known, other.clock)
        self.compare(len(known) * count)
        for other in met:
            _learn(other.clock, known)
        for other in met[:-1]:
            other.at += 1
            self.ready.append(other)
        met.clear()
        return True

    def compare(self, entries: int) -> None:
        self.compared += entries
        if self.compared > MOST_COMPARED:
            raise ScheduleError(f"{self.plan.name}: too many signals between too many thread blocks to look for races")

    def do(self, block: _Block, op: Operation) -> None:
        if op.kind in REDUCES:
            self.reduce(block, op)
        elif op.kind in PUTS or op.kind in ("get", "copy"):
            if len(op.sources) != len(op.targets) or not op.sources:
                raise ValueError(f"{op.kind} has {len(op.sources)} sources and {len(op.targets)} targets")
            for source, target in zip(op.sources, op.targets, strict=True):
                self.write(block, target, self.read(block, source), reduce=False)

    def reduce(self, block: _Block, op: Operation) -> None:
        """The sum of all sources goes to the first target, and from there to the others."""
        if len(op.sources) < 2 or not op.targets:
            raise ValueError(f"{op.kind} has {len(op.sources)} sources and {len(op.targets)} targets; wanted at least 2 and 1")
        first, *others = op.targets
        own = next((source for source in op.sources if _same(source, first)), None)
        if own is not None:
            self.touch(block, own, write=False)
            for chunk in range(own.start, own.start + own.size) if own.buffer != "s" else ():
                self.memory.check_current(own.rank, own.buffer, chunk)
        rest = [self.read(block, source) for source in op.sources if source is not own]
        if any(len(values) != first.size for values in rest):
            raise ValueError(f"{op.kind} adds buffers of different sizes")
        self.write(
            block,
            first,
            [[part for value in parts for part in value] for parts in zip(*rest, strict=True)],
            reduce=own is not None,
        )
        for other in others:
            self.write(block, other, self.read(block, first), reduce=False)

    def read(self, block: _Block, place: Place) -> list[Value]:
        self.touch(block, place, write=False)
        return self.memory.read(place.rank, (place.buffer, place.start), place.size)

    def write(self, block: _Block, place: Place, values: list[Value], *, reduce: bool) -> None:
        if len(values) != place.size:
            raise ValueError(f"{len(values)} chunks go to a place of {place.size}")
        self.touch(block, place, write=True)
        self.memory.write(place.rank, (place.buffer, place.start), values, reduce=reduce)

    def touch(self, block: _Block, place: Place, *, write: bool) -> None:
        """Raise if another thread block may access the same chunks at the same time, and one of the two writes."""
        buffer = "i" if place.buffer == "o" and self.plan.in_place else place.buffer
        for chunk in range(place.start, place.start + place.size):
            seen = self.accesses[place.rank, buffer, chunk]
            earlier = [] if seen.written is None else [seen.written]
            for other, done in [*earlier, *seen.read.items()] if write else earlier:
                if block.clock.get(other, 0) < done:
                    rival = self.blocks[other]
                    raise ValueError(
                        f"races with operation {done - 1} of gpu {rival.rank}, thread block {rival.number}: chunk {chunk} of"
                        f" buffer {place.buffer} of gpu {place.rank}, and no signal says which of them comes first"
                    )
            if write:
                seen.written, seen.read = (block.identity, block.at + 1), {}
            else:
                seen.read[block.identity] = block.at + 1

    def fail(self, block: _Block, fact: str) -> ScheduleError:
        return ScheduleError(f"{self.plan.name}: gpu {block.rank}, thread block {block.number}, operation {block.at}: {fact}")


def _learn(mine: Clock, clock: Clock) -> None:
    for other, done in clock.items():
        if mine.get(other, 0) < done:
            mine[other] = done


def _same(a: Place, b: Place) -> bool:
    """Whether two places hold the same chunks: the input and the output are one buffer for a schedule."""
    return (a.rank, a.start, a.size) == (b.rank, b.start, b.size) and (a.buffer == "s") == (b.buffer == "s")

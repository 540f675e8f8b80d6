"""Import a schedule from MSCCL: run the program on symbols, and pack what it does into few steps (`msccl_memory.py`)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from .msccl_memory import Memory, Value, steps_of
from .msccl_xml import RECEIVES, SENDS, Algorithm, Instruction, parse
from .ops import Schedule, ScheduleError


def from_msccl(xml: str | bytes) -> Schedule:
    """Read an all-reduce in the XML of MSCCL. Use `verify` to check it.

    Channels, thread blocks and instances only describe who does the work, so the schedule has none. A message into scratch that
    is added later becomes one message that adds. Scratch that is forwarded becomes a message from the rank that it came from.

    Args:
        xml: The output of msccl-tools: `send`, `recv`, their fused forms, `copy`, `reduce` and `nop` steps.

    Returns:
        The schedule, with as few steps as its messages allow.

    Raises:
        ScheduleError: If the text is not an all-reduce, deadlocks, or does what a schedule cannot do without scratch.

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
    _check_connections(algorithm)
    machine = _Machine(algorithm)
    machine.run()
    machine.memory.check_end(algorithm.name, len(algorithm.gpus))
    return Schedule(algorithm.name, len(algorithm.gpus), algorithm.chunks, steps_of(algorithm.name, machine.memory.messages))


def _check_connections(algorithm: Algorithm) -> None:
    """Raise if thread blocks of a GPU share a connection: its messages would have no order."""
    for rank, blocks in enumerate(algorithm.gpus):
        kinds = [(block, {step.kind for step in block.steps}) for block in blocks]
        used = Counter(("sends to", block.send, block.channel) for block, has in kinds if has & SENDS)
        used += Counter(("receives from", block.receive, block.channel) for block, has in kinds if has & RECEIVES)
        for (way, peer, channel), count in used.items():
            if count > 1:
                fact = f"gpu {rank} {way} gpu {peer} on channel {channel} in {count} thread blocks; MSCCL allows one"
                raise ScheduleError(f"{algorithm.name}: {fact}")


class _Machine:
    """Simulates all GPUs: in every turn, each thread block runs a step if it can."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.memory = Memory(algorithm.chunks, in_place=algorithm.in_place)
        self.queues: dict[tuple[int, int, int], deque[list[Value]]] = defaultdict(deque)
        self.done = [[0] * len(blocks) for blocks in algorithm.gpus]

    def run(self) -> None:
        waiting = [(rank, block) for rank, blocks in enumerate(self.algorithm.gpus) for block in blocks if block.steps]
        while waiting:
            before = [list(row) for row in self.done]  # steps done in a turn count from the next turn on
            progress = False
            for rank, block in waiting:
                at = before[rank][block.number]
                step = block.steps[at]
                if step.after is not None:
                    other, number = step.after
                    if other >= len(before[rank]) or number >= len(self.algorithm.gpus[rank][other].steps):
                        raise self.fail(
                            rank, block.number, at, f"waits for step {number} of thread block {other}, which does not exist"
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
                raise self.fail(rank, block.number, self.done[rank][block.number], "deadlocks with all others")
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
                came = self.memory.read(rank, step.source, step.count)
            if kind == "rrs":
                self.queues[rank, send, channel].append(self.sum_on_the_way(rank, step, came or []))
                return
            if kind in ("rrc", "rrcs", "re"):
                self.memory.add(rank, step.target if kind == "re" else step.source, step.target, came or [])
            elif came is not None:
                self.memory.write(rank, step.target, came, reduce=False)
            if kind in SENDS:
                place = step.source if kind == "s" else step.target
                self.queues[rank, send, channel].append(self.memory.read(rank, place, step.count))
        except ValueError as error:
            raise self.fail(rank, block, at, str(error)) from None

    def sum_on_the_way(self, rank: int, step: Instruction, came: list[Value]) -> list[Value]:
        """What rrs sends. MSCCL does not store it, a schedule stores it in the chunk, whose old value must not be read again."""
        if step.source[0] == "s":
            held = self.memory.read(rank, step.source, step.count)
            return [[*a, *b] for a, b in zip(held, came, strict=True)]
        self.memory.add(rank, step.source, step.source, came)
        sums = self.memory.read(rank, step.source, step.count)
        self.memory.stale.update((rank, step.source[1] + i) for i in range(step.count))
        return sums

    def fail(self, rank: int, block: int, step: int, fact: str) -> ScheduleError:
        return ScheduleError(f"{self.algorithm.name}: gpu {rank}, thread block {block}, step {step}: {fact}")

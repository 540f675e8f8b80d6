"""Export a schedule to MSCCL: every message becomes a send of one thread block and a receive of another.

A rank has a thread block for every rank that it sends to, and one for every rank that it receives from. Waits keep the order: a
send waits for the receives that wrote its chunks in earlier steps; a receive waits for the sends that read its chunks up to its
own step, and for the last receive that wrote them. A step of MSCCL waits for at most one other step, so `nop` steps do the rest
of the waiting."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from html import escape

from .lower import plain_moves
from .ops import Move, Schedule
from .printable import printable

Place = tuple[int, int]  # a thread block of a rank, and a step in it
MOST_CHUNKS = 64  # in a step; MSCCL refuses 72 (MSCCL_MAX_COUNT)
MOST_BYTES = 32 << 30  # RCCL demands a limit and takes 0 for none, microsoft/msccl takes 0 as it is


@dataclass(slots=True)
class _Step:
    kind: str
    start: int
    count: int
    after: Place | None = None
    awaited: bool = False


@dataclass(slots=True)
class _Gpu:
    """One rank: its thread blocks by peer, and which steps last wrote and read every chunk."""

    blocks: dict[tuple[str, int], list[_Step]] = field(default_factory=dict)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    writers: dict[int, Place] = field(default_factory=dict)
    readers: dict[int, set[Place]] = field(default_factory=lambda: defaultdict(set))

    def add(self, key: tuple[str, int], kind: str, run: range, needs: set[Place]) -> Place:
        """Append a step to the thread block of `key`, after `needs`. Earlier steps of the same block need no wait."""
        block = self.blocks[key]
        mine = self.numbers[key]
        latest: dict[int, int] = {}
        for other, step in needs:
            if other != mine:
                latest[other] = max(step, latest.get(other, 0))
        waits: list[Place] = sorted(latest.items())
        block += [_Step("nop", -1, 0, place) for place in waits[:-1]]
        block.append(_Step(kind, run.start, len(run), waits[-1] if waits else None))
        return mine, len(block) - 1


def to_msccl(s: Schedule, *, protocol: str = "Simple") -> str:
    """Write an all-reduce as XML for MSCCL.

    Args:
        s: The schedule. Collectives are written as the messages of `lower(s)`.
        protocol: The `proto` of the algorithm: `"Simple"`, `"LL"` or `"LL128"`.

    Returns:
        XML that MSCCL and `from_msccl` read. Reading it gives the messages of `s` in as few steps as possible.

    Raises:
        ScheduleError: If `s` is not a sum, or scales or encodes, which MSCCL cannot do.

    Example:
        >>> print(phalanx.schedule.to_msccl(phalanx.schedule.recursive_doubling(2)).splitlines()[1])
        <gpu id="0" i_chunks="1" o_chunks="0" s_chunks="0">
    """
    moves = plain_moves(s, "MSCCL")
    gpus = [_Gpu() for _ in range(s.world)]
    _number_blocks(gpus, moves)
    for step in moves:
        reads = [(move, run, _send(gpus[move.src], move, run)) for move in step for run in _pieces(move)]
        for move, run, place in reads:  # all ops of a step read the state before it
            for chunk in run:
                gpus[move.src].readers[chunk].add(place)
        for move, run, _ in reads:
            _receive(gpus[move.dst], move, run)
    return _xml(s, gpus, protocol)


def _number_blocks(gpus: list[_Gpu], moves: list[list[Move]]) -> None:
    used = {(move.src, move.dst) for step in moves for move in step}
    for rank, gpu in enumerate(gpus):
        keys = [("send", dst) for src, dst in sorted(used) if src == rank]
        keys += [("recv", src) for src, dst in sorted(used) if dst == rank]
        gpu.blocks = {key: [] for key in keys}
        gpu.numbers = {key: number for number, key in enumerate(keys)}


def _pieces(move: Move) -> list[range]:
    return [run[at : at + MOST_CHUNKS] for run in move.runs for at in range(0, len(run), MOST_CHUNKS)]


def _send(gpu: _Gpu, move: Move, run: range) -> Place:
    needs = {gpu.writers[chunk] for chunk in run if chunk in gpu.writers}
    return gpu.add(("send", move.dst), "s", run, needs)


def _receive(gpu: _Gpu, move: Move, run: range) -> None:
    needs = {gpu.writers[chunk] for chunk in run if chunk in gpu.writers}
    for chunk in run:
        needs |= gpu.readers[chunk]
    place = gpu.add(("recv", move.src), "rrc" if move.reduce else "r", run, needs)
    for chunk in run:
        gpu.writers[chunk] = place
        gpu.readers[chunk] = set()


def _xml(s: Schedule, gpus: list[_Gpu], protocol: str) -> str:
    for gpu in gpus:
        named = list(gpu.blocks.values())
        for block in named:
            for step in block:
                if step.after is not None:
                    named[step.after[0]][step.after[1]].awaited = True
    name = escape(printable(s.name), quote=True)
    lines = [
        f'<algo name="{name}" proto="{escape(protocol)}" nchannels="1" nchunksperloop="{s.chunks}" ngpus="{s.world}"'
        f' coll="allreduce" inplace="1" outofplace="0" minBytes="0" maxBytes="{MOST_BYTES}">'
    ]
    for rank, gpu in enumerate(gpus):
        lines.append(f'<gpu id="{rank}" i_chunks="{s.chunks}" o_chunks="0" s_chunks="0">')
        for number, ((way, peer), block) in enumerate(gpu.blocks.items()):
            send, receive = (peer, -1) if way == "send" else (-1, peer)
            lines.append(f'<tb id="{number}" send="{send}" recv="{receive}" chan="0">')
            lines += [_line(at, step) for at, step in enumerate(block)]
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"]) + "\n"


def _line(at: int, step: _Step) -> str:
    block, number = step.after or (-1, -1)
    target = "o" if step.kind == "nop" else "i"
    return (
        f'<step s="{at}" type="{step.kind}" srcbuf="i" srcoff="{step.start}" dstbuf="{target}" dstoff="{step.start}"'
        f' cnt="{step.count}" depid="{block}" deps="{number}" hasdep="{int(step.awaited)}"/>'
    )

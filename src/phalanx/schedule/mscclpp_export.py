"""Export a schedule to MSCCL++: every message is put into scratch of its receiver, which adds or copies it from there.

Chunks do not depend on each other, so each of up to 8 thread blocks of a rank has its own run of them, and its own channel to
every rank that it exchanges with. In each step it puts all that it sends, signals, waits, and then adds or copies. So all ops of
a step read the state before it. Every message has its own place in scratch, so no rank waits for a free place. The next
all-reduce uses the other half of a double scratch. The one after it cannot begin before every rank has left the first."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from .lower import plain_moves
from .ops import Move, Schedule
from .printable import printable

BLOCKS = 8  # thread blocks per rank
THREADS = 1024
Pair = tuple[int, int]


def to_mscclpp(s: Schedule) -> str:
    """Write an all-reduce as an execution plan for MSCCL++.

    It uses memory channels, so the GPUs must reach each other's memory: one host, or several that NVLink joins.

    Args:
        s: The schedule. Collectives are written as the messages of `lower(s)`.

    Returns:
        JSON that MSCCL++'s executor and `from_mscclpp` read. Reading it gives the messages of `s` in as few steps as possible.

    Raises:
        ScheduleError: If `s` is not a sum, or scales or encodes, which MSCCL++ cannot do.

    Example:
        >>> import json
        >>> plan = json.loads(phalanx.schedule.to_mscclpp(phalanx.schedule.recursive_doubling(2)))
        >>> [op["name"] for op in plan["gpus"][0]["threadblocks"][0]["ops"]]
        ['put', 'nop', 'signal', 'wait', 'nop', 're', 'nop']
    """
    moves = plain_moves(s, "MSCCL++")
    gpus = [_Gpu(rank) for rank in range(s.world)]
    width = -(-s.chunks // BLOCKS)
    for step in moves:
        _write_step(gpus, step, width)
    _connect(gpus)
    plan = {
        "name": printable(s.name),
        "collective": "allreduce",
        "protocol": "Simple",
        "inplace": True,
        "reuse_resources": False,
        "gpus": [gpu.record(s.chunks) for gpu in gpus],
        "num_threads_per_block": THREADS,
        "use_double_scratch_buffer": True,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
    }
    return json.dumps(plan, indent=1) + "\n"


class _Gpu:
    """One rank: the operations of each thread block. They name peers until channels and buffers have numbers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.scratch = 0
        self.ops: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.peers: dict[int, set[int]] = defaultdict(set)  # thread block -> the ranks that it exchanges with
        self.targets: dict[int, set[int]] = defaultdict(set)  # and those whose scratch it writes
        self.channels: dict[Pair, int] = {}  # thread block and peer -> channel

    def record(self, chunks: int) -> dict[str, Any]:
        written = sorted(set().union(*self.targets.values()))
        blocks = [self.block(number, block, written) for number, block in enumerate(sorted(self.ops))]
        return {
            "id": self.rank,
            "input_chunks": chunks,
            "output_chunks": chunks,
            "scratch_chunks": self.scratch,
            "threadblocks": blocks,
            "channels": [{"channel_type": "memory", "connected_to": [peer for _, peer in self.channels]}]
            if self.channels
            else [],
            "remote_buffers": [{"rank": peer, "type": "s", "access_channel_types": ["memory"]} for peer in written],
            "semaphores": [],
        }

    def block(self, number: int, block: int, written: list[int]) -> dict[str, Any]:
        peers, targets = sorted(self.peers[block]), sorted(self.targets[block])
        for op in self.ops[block]:
            if op["name"] in ("signal", "wait"):
                op["channel_ids"] = [peers.index(peer) for peer in op["channel_ids"]]
            for place in op.get("dst_buff", ()):
                if "buffer_id" in place:
                    place["buffer_id"] = targets.index(place["buffer_id"])
        references = [{"access_channel_type": "memory", "remote_buffer_ids": [written.index(peer) for peer in targets]}]
        return {
            "id": number,
            "ops": self.ops[block],
            "channels": [{"channel_type": "memory", "channel_ids": [self.channels[block, peer] for peer in peers]}],
            "remote_buffer_refs": references if targets else [],
        }


def _write_step(gpus: list[_Gpu], step: list[Move], width: int) -> None:
    puts: dict[Pair, list[dict[str, Any]]] = defaultdict(list)
    signals: dict[Pair, list[int]] = defaultdict(list)  # rank and thread block -> peers
    waits: dict[Pair, list[int]] = defaultdict(list)
    takes: dict[Pair, list[dict[str, Any]]] = defaultdict(list)
    for move in step:
        for block, run in _cut(move, width):
            target = gpus[move.dst]
            slot, size = target.scratch, len(run)
            target.scratch += size
            own, scratch = {"type": "i", "index": run.start, "size": size}, {"type": "s", "index": slot, "size": size}
            there = {"buffer_id": move.dst, "index": slot, "size": size}
            puts[move.src, block].append({"name": "put", "src_buff": [own], "dst_buff": [there], "channel_type": "memory"})
            adds = {"name": "re", "src_buff": [own, scratch], "dst_buff": [own], "reduce_op": "sum"}
            takes[move.dst, block].append(adds if move.reduce else {"name": "copy", "src_buff": [scratch], "dst_buff": [own]})
            for mine, other, peers in ((move.src, move.dst, signals), (move.dst, move.src, waits)):
                gpus[mine].peers[block].add(other)
                if other not in peers[mine, block]:
                    peers[mine, block].append(other)
            gpus[move.src].targets[block].add(move.dst)
    for rank, block in sorted({*puts, *takes}):
        ops, at = gpus[rank].ops[block], (rank, block)
        if at in puts:
            ops += [*puts[at], {"name": "nop"}, {"name": "signal", "channel_ids": signals[at], "channel_type": "memory"}]
        if at in takes:
            ops += [
                {"name": "wait", "channel_ids": waits[at], "channel_type": "memory"},
                {"name": "nop"},
                *takes[at],
                {"name": "nop"},
            ]


def _cut(move: Move, width: int) -> list[tuple[int, range]]:
    """The runs of a message, cut where another thread block takes over."""
    found = []
    for run in move.runs:
        start = run.start
        while start < run.stop:
            block = start // width
            stop = min(run.stop, (block + 1) * width)
            found.append((block, range(start, stop)))
            start = stop
    return found


def _connect(gpus: list[_Gpu]) -> None:
    """Number the channels. Both ranks of a pair number theirs in the order of thread blocks, so that the two ends match."""
    for gpu in gpus:
        for block in sorted(gpu.peers):
            for peer in sorted(gpu.peers[block]):
                gpu.channels[block, peer] = len(gpu.channels)

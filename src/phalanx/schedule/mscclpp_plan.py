"""MSCCL++'s execution plans as a value: thread blocks per GPU, operations per thread block. The parser does not trust its input.

    {"name": "ring", "collective": "allreduce", "protocol": "Simple", "inplace": true,
     "gpus": [{"id": 0, "input_chunks": 4, "output_chunks": 4, "scratch_chunks": 4,
               "threadblocks": [{"id": 0, "ops": [{"name": "put", "src_buff": [{"type": "i", "index": 0, "size": 1}],
                                                   "dst_buff": [{"buffer_id": 0, "index": 0, "size": 1}], ...}, ...],
                                 "channels": [{"channel_type": "memory", "channel_ids": [0]}],
                                 "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}]}],
               "channels": [{"channel_type": "memory", "connected_to": [1]}],
               "remote_buffers": [{"rank": 1, "type": "s", "access_channel_types": ["memory"]}], "semaphores": []}, ...]}

An operation gives the numbers of channels and remote buffers in its thread block, which gives their numbers in its GPU. The n-th
channel from one GPU to another and the n-th channel back are the two ends of one. Format: what the DSL of microsoft/mscclpp
writes since `input_chunks` replaced `inputChunks` (read at commit c7fec5c), with the protocol "Simple"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .limits import MAX_CHUNKS, MAX_RANKS, check_name
from .ops import ScheduleError
from .plain_json import brief, loads, read_text, read_whole

MAX_BYTES = 64 << 20
MAX_OPS = 1_000_000
MAX_TOUCHED = 1 << 23  # chunks, over all operations
SIGNALS = {"signal": "signal", "rlxsignal": "signal"}
WAITS = {"wait": "wait", "rlxwait": "wait"}
PUTS = frozenset({"put", "pws", "pwsf"})
REDUCES = frozenset({"re", "res", "rre", "rres"})
DATA = PUTS | REDUCES | {"get", "copy"}
SILENT = frozenset({"nop", "flush"})  # they order the threads of a block, or its own transfers
PACKETS = frozenset({"cpkt", "upkt", "repkt", "recpkt", "ppkt", "rppkt", "respkt", "recspkt"})
SWITCH = frozenset({"gstore", "glre", "glres"})
CHANNELS = ("memory", "port")


@dataclass(frozen=True, slots=True)
class Place:
    """A run of chunks in a buffer of a GPU: i, o or s."""

    rank: int
    buffer: str
    start: int
    size: int


Channel = tuple[int, int, str, int]  # from a rank, to a rank, the type, and the number among those


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a thread block. `numbers` are semaphores, or a barrier and how many thread blocks meet there."""

    kind: str
    sources: tuple[Place, ...] = ()
    targets: tuple[Place, ...] = ()
    channels: tuple[Channel, ...] = ()
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. `gpus[r]` has the operations of each thread block of rank r, `semaphores[r]` the initial values of semaphores."""

    name: str
    chunks: int
    in_place: bool
    gpus: tuple[tuple[tuple[Operation, ...], ...], ...]
    semaphores: tuple[tuple[int, ...], ...]


def parse_plan(text: str | bytes) -> Plan:
    """Parse a plan from JSON. ScheduleError names the place if it is not a plan, or not one that a schedule can express."""
    if len(text) > MAX_BYTES:
        raise ScheduleError(f"{len(text):,} bytes of JSON; at most {MAX_BYTES:,} are read")
    try:
        return _plan(_record(loads(text), "the plan"))
    except ScheduleError:
        raise
    except ValueError as error:
        raise ScheduleError(f"not a plan of MSCCL++: {error}") from None


def _plan(value: dict[str, Any]) -> Plan:
    gpus = _list(value, "gpus", MAX_RANKS)
    if gpus and isinstance(gpus[0], dict) and "inputChunks" in gpus[0]:
        raise ScheduleError(
            "a plan of an older MSCCL++ (inputChunks); write it again with a newer one, which writes input_chunks"
        )
    name = check_name(read_text(value.get("name", "mscclpp"), "name", 10_000))
    collective, protocol = value.get("collective"), value.get("protocol", "Simple")
    if collective != "allreduce":
        raise ScheduleError(f"{name}: collective {brief(collective)}; only allreduce is read")
    if protocol != "Simple":
        raise ScheduleError(f"{name}: protocol {brief(protocol)}; only Simple is read: packets carry flags instead of signals")
    readers = [_Gpu(_record(gpu, f"gpu {rank}"), rank, len(gpus)) for rank, gpu in enumerate(gpus)]
    if not readers or len({reader.chunks for reader in readers}) > 1:
        raise ScheduleError(
            f"{name}: the gpus have {sorted({r.chunks for r in readers})[:8]} input_chunks; wanted the same on all"
        )
    total, touched, blocks = 0, 0, []
    for reader in readers:
        blocks.append(reader.blocks(readers))
        operations = [op for block in blocks[-1] for op in block]
        total += len(operations)
        touched += sum(place.size for op in operations for place in (*op.sources, *op.targets))
        if total > MAX_OPS or touched > MAX_TOUCHED:
            raise ScheduleError(f"{name}: more than {MAX_OPS:,} operations, or than {MAX_TOUCHED:,} chunks in them")
    in_place = value.get("inplace", True)
    if not isinstance(in_place, bool):
        raise ScheduleError(f"{name}: inplace is {brief(in_place)}; give true or false")
    return Plan(name, readers[0].chunks, in_place, tuple(blocks), tuple(reader.semaphores for reader in readers))


class _Gpu:
    """Reads one GPU."""

    def __init__(self, value: dict[str, Any], rank: int, world: int) -> None:
        self.value, self.rank, self.world = value, rank, world
        self.owners: Sequence[_Gpu] = ()  # all GPUs, once they are read
        if read_whole(value.get("id"), "id of a gpu", 0, MAX_RANKS) != rank:
            raise ValueError(f"gpu {brief(value.get('id'))} where {rank} was expected")
        self.chunks = read_whole(value.get("input_chunks"), f"input_chunks of gpu {rank}", 1, MAX_CHUNKS)
        self.scratch = read_whole(value.get("scratch_chunks", 0), f"scratch_chunks of gpu {rank}", 0, 1 << 24)
        self.channels: dict[str, list[Channel]] = {}
        seen: Counter[tuple[str, int]] = Counter()
        for entry in _records(value, "channels", 1 << 10):
            kind = _channel_type(entry.get("channel_type"))
            for peer in _list(entry, "connected_to", 1 << 20):
                peer = self.peer(peer)
                self.channels.setdefault(kind, []).append((rank, peer, kind, seen[kind, peer]))
                seen[kind, peer] += 1
        self.remote = [
            (self.peer(entry.get("rank")), _buffer(entry.get("type"))) for entry in _records(value, "remote_buffers", 1 << 20)
        ]
        semaphores = _records(value, "semaphores", 1 << 16)
        self.semaphores = tuple(read_whole(entry.get("init_value", 0), "init_value", 0, 1 << 20) for entry in semaphores)

    def peer(self, value: Any) -> int:
        peer = read_whole(value, f"a peer of gpu {self.rank}", 0, self.world - 1)
        if peer == self.rank:
            raise ValueError(f"gpu {peer} has a channel or a remote buffer to itself")
        return peer

    def blocks(self, owners: Sequence[_Gpu]) -> tuple[tuple[Operation, ...], ...]:
        """The operations of each thread block. Every place in them is in a buffer of one of `owners`."""
        self.owners = owners
        found = []
        for number, block in enumerate(_records(self.value, "threadblocks", 1 << 16)):
            where = f"gpu {self.rank}, thread block {number}"
            channels = {
                _channel_type(entry.get("channel_type")): _picked(entry, "channel_ids", self.channels, entry.get("channel_type"))
                for entry in _records(block, "channels", 8)
            }
            remote = {
                _channel_type(entry.get("access_channel_type")): _picked(entry, "remote_buffer_ids", {"": self.remote}, "")
                for entry in _records(block, "remote_buffer_refs", 8)
            }
            operations: list[Operation] = []
            try:
                operations.extend(self.operation(value, channels, remote) for value in _records(block, "ops", MAX_OPS))
            except ValueError as error:
                raise ScheduleError(f"{where}, operation {len(operations)}: {error}") from None
            found.append(tuple(operations))
        return tuple(found)

    def operation(
        self, value: dict[str, Any], channels: dict[str, list[Channel]], remote: dict[str, list[tuple[int, str]]]
    ) -> Operation:
        kind = value.get("name")
        _refuse(kind, value)
        if kind in SILENT:
            return Operation("nop")
        if kind == "barrier":
            identity = read_whole(value.get("barrier_id"), "barrier_id", 0, 1 << 20)
            return Operation(
                "barrier", numbers=(identity, read_whole(value.get("num_threadblocks"), "num_threadblocks", 1, 1 << 16))
            )
        if kind in ("sem_acquire", "sem_release"):
            ids = _list(value, "semaphore_ids", 1 << 10)
            most = len(self.semaphores) - 1
            return Operation(kind, numbers=tuple(read_whole(number, "a semaphore", 0, most) for number in ids))
        through = _channel_type(value.get("channel_type")) if "channel_type" in value and value["channel_type"] != "none" else ""
        used = tuple(_pick(channels.get(through, []), number, "channel") for number in _list(value, "channel_ids", 1 << 10))
        if kind in SIGNALS or kind in WAITS:
            return Operation(SIGNALS.get(kind) or WAITS[kind], channels=used)
        buffers = remote.get(through, [])
        sources, targets = (
            tuple(self.place(entry, buffers) for entry in _records(value, side, 1 << 10)) for side in ("src_buff", "dst_buff")
        )
        return Operation(str(kind), sources, targets, used if kind in PUTS and kind != "put" else ())

    def place(self, value: dict[str, Any], buffers: list[tuple[int, str]]) -> Place:
        if "buffer_id" in value:
            rank, buffer = _pick(buffers, value["buffer_id"], "remote buffer")
        else:
            rank, buffer = self.rank, _buffer(value.get("type"))
        most = self.owners[rank].scratch if buffer == "s" else self.owners[rank].chunks
        if not most:
            raise ValueError(f"uses scratch of gpu {rank}, whose scratch_chunks are 0")
        where = f"of gpu {rank}'s buffer {buffer}"
        start = read_whole(value.get("index"), f"index {where}", 0, most - 1)
        return Place(rank, buffer, start, read_whole(value.get("size"), f"size {where} from {start}", 1, most - start))


def _refuse(kind: Any, value: dict[str, Any]) -> None:
    """Raise for what a schedule cannot express."""
    if not isinstance(kind, str):
        raise ValueError(f"no operation of MSCCL++ is called {brief(kind)}")
    if kind in PACKETS:
        raise ValueError(f"{kind} moves packets, whose flags do the waiting; only the protocol Simple is read")
    if kind in SWITCH:
        raise ValueError(f"{kind} adds in the switch, which a schedule cannot do")
    if kind == "pipeline":
        raise ValueError("a pipeline cuts chunks by bytes; chunks of a schedule are whole")
    if "tbg" in value:
        raise ValueError("thread blocks that share an operation (tbg) are not read; write the plan without groups")
    if kind not in {*SILENT, *SIGNALS, *WAITS, *DATA, "barrier", "sem_acquire", "sem_release"}:
        raise ValueError(f"no operation of MSCCL++ is called {brief(kind)}")
    if value.get("reduce_op", "sum") != "sum":
        raise ValueError(f"reduce_op {brief(value['reduce_op'])}; a schedule sums")


def _record(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {brief(value)}; give an object")
    return value


def _list(value: dict[str, Any], name: str, most: int) -> list[Any]:
    found = value.get(name, [])
    if not isinstance(found, list) or len(found) > most:
        raise ValueError(f"{name} is {brief(found)}; give a list of at most {most:,}")
    return found


def _records(value: dict[str, Any], name: str, most: int) -> list[dict[str, Any]]:
    return [_record(entry, f"an entry of {name}") for entry in _list(value, name, most)]


def _channel_type(value: Any) -> str:
    if value == "switch":
        raise ScheduleError("a switch channel adds in the switch, which a schedule cannot do")
    if value not in CHANNELS:
        raise ValueError(f"channel type {brief(value)}; give memory or port")
    return str(value)


def _buffer(value: Any) -> str:
    if value not in ("i", "o", "s"):
        raise ValueError(f"buffer type {brief(value)}; give i, o or s")
    return str(value)


def _picked(value: dict[str, Any], name: str, lists: dict[str, list[Any]], key: Any) -> list[Any]:
    return [_pick(lists.get(str(key), []), number, name) for number in _list(value, name, 1 << 20)]


def _pick(entries: list[Any], number: Any, name: str) -> Any:
    return entries[read_whole(number, f"{name}, of {len(entries)},", 0, len(entries) - 1)]

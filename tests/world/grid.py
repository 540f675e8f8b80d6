"""The conformance grid: every verb, op, dtype and size on every way that bytes can take. Here are its cells, as values.

Sizes come from the code: one element less, exactly, and one more than each size at which something takes another way. A cell is
an operation with small whole numbers, which every dtype holds exactly; `grid_verbs` runs it and compares with a stupid oracle.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from phalanx.comm import broadcast, choose, envelope, peers, run, runner
from phalanx.native import core

MIB = 1 << 20

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", *INTEGERS, *FLOATS)
OPS = ("sum", "mean", "max", "min")
REDUCTIONS = ("all_reduce", "all_reduce_async", "all_reduce in a buffer", "reduce_scatter")
MESSAGES = ("bcast", "gather", "allgather", "scatter", "alltoall", "send", "exchange_async")
SCHEDULES = (
    "ring", "tree", "halving_doubling", "recursive_doubling", "torus", "hierarchical", "gossip", "gossip_hypercube",
    "binomial", "scatter_gather", "mixing",
)  # fmt: skip
VERBS = (*REDUCTIONS, *MESSAGES, *(f"run {name}" for name in SCHEDULES), "barrier")


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation: `count` elements on each rank (or to each), `why` says where the size comes from."""

    verb: str
    op: str
    dtype: str
    count: int
    why: str

    @property
    def nbytes(self) -> int:
        return self.count * getattr(torch, self.dtype).itemsize


def native() -> bool:
    return core.is_native()


# The sizes, in bytes on a rank, at which something changes in a world of n ranks; by the name of the constant they come from.
THRESHOLDS: dict[str, Callable[[int], list[int]]] = {
    "phalanx.comm.run.LANE_BYTES": lambda n: [k * run.LANE_BYTES for k in range(1, run.LANES + 2)],
    "phalanx.comm.run.LANES": lambda n: [run.LANES * run.LANE_BYTES],
    "phalanx.comm.choose.LAB.small_on_one_host": lambda n: [choose.LAB.small_on_one_host],
    "phalanx.comm.choose.LAB.small_between_hosts": lambda n: [choose.LAB.small_between_hosts],
    "phalanx.comm.choose.LAB.small_between_leaders": lambda n: [choose.LAB.small_between_leaders],
    "phalanx.comm.choose.LAB.short_in_a_torus": lambda n: [choose.LAB.short_in_a_torus * n],
    "phalanx.comm.broadcast.BCAST_TREE": lambda n: [broadcast.BCAST_TREE],
    "phalanx._native.SMALL_BYTES": lambda n: [core._native.SMALL_BYTES // n] if native() else [],
    "phalanx._native.FEW_BYTES": lambda n: [core._native.FEW_BYTES // n] if native() else [],
    # a large operation is cut into pieces of 1/(4 ranks), which are an eighth of this at least, and this at most
    "phalanx._native.CHUNK_BYTES": lambda n: (
        [core._native.CHUNK_BYTES // 8 * 4 * n, core._native.CHUNK_BYTES * 4 * n] if native() else []
    ),
    # a longer tensor than this passes in pieces
    "phalanx._native.whole_bytes": lambda n: [core._native.whole_bytes(n)] if native() else [],
    "phalanx._native.third_bytes": lambda n: (
        [(core._native.whole_bytes(n) // core._native.third_bytes(n) + k) * core._native.third_bytes(n) for k in (1, 2)]
        if native()
        else []
    ),
    "phalanx.comm.envelope.HEADER": lambda n: [8 * envelope.HEADER],
}
# Others are not sizes of a tensor: `special` cells of test_grid.py turn them.
SPECIAL = {
    "phalanx.comm.peers.WINDOW": peers.WINDOW,  # a count of ranks
    "phalanx.comm.transports.torch.transport.PIECE": 256 * MIB,  # made small for the test
    "phalanx.comm.runner.KEEP": runner.KEEP,  # made small for the test
}
# Numbers that no tensor's size is compared with, and why.
EXEMPT = {
    "phalanx.comm.barrier.DIGEST": "of a name",
    "phalanx.comm.codec.MAX_DEPTH": "of nested objects",
    "phalanx.comm.envelope.MOST_DIMS": "torch's own limit",
    "phalanx.comm.launch.MOST_RANKS": "of a world",
    **{f"phalanx.comm.heap.{name}": "of the C library" for name in ("FROM_HEAP", "KEPT", "M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD")},
    "phalanx.comm.launch.DEFAULT_PORT": "a port",
    **{f"phalanx.comm.launch.ALONE.{name}": "of a world of one" for name in
       ("rank", "world", "local_rank", "local_world", "port", "attempt", "listener")},
    "phalanx.comm.elastic.children.NOT_STARTED": "an exit code",
    "phalanx.comm.elastic.guard.FENCED": "an exit code",
    "phalanx.comm.elastic.head.TOO_FEW": "an exit code",
    "phalanx.comm.elastic.supervisor.NO_MEETING": "an exit code",
    "phalanx.comm.elastic.head.NOT_YET": "of ranks",
    "phalanx.comm.elastic.door.LONGEST": "of a text",
    "phalanx.comm.elastic.echo.TRIES": "of questions on a link",
    **{f"phalanx.comm.elastic.echo.{name}": "of questions on a link" for name in ("NONCE", "SIGNATURE")},
    **{f"phalanx.comm.block_code.{name}": "limits of an option, in tests/comm/test_block_code.py" for name in ("LEAST", "MOST")},
    "phalanx.comm.run.ALIGN": "where messages begin in a buffer",
    "phalanx.comm.elastic.state.TAG": "of messages",
    "phalanx.comm.elastic.state.COLUMNS": "of checksums; tests/comm/elastic/test_state.py has lengths around whole rows",
    "phalanx.comm.elastic.state.PIECE": "of messages of bytes; tests/comm/elastic/test_state.py has pieces of 7",
    "phalanx.comm.hotline.CALLERS": "of questions that wait for an answer",
    "phalanx.comm.hotline.HELD": "of questions",
    "phalanx.comm.hotline.LONGEST": "of a question",
    "phalanx.comm.launch.SHORTEST_SECRET": "of a text",
    "phalanx.comm.notes.LONGEST": "of a file",
    "phalanx.comm.meeting.LONGEST": "of a text",
    "phalanx.comm.signed.SIGNATURE": "of a text",
    "phalanx.comm.signed.TRIES": "of attempts to write a key",
    "phalanx.comm.rendezvous._MAGIC": "of torch's store",
    "phalanx.comm.rendezvous._PING": "of torch's store",
    "phalanx.comm.rendezvous._VALIDATE": "of torch's store",
    "phalanx.comm.traffic.TAGS": "of records of messages that are kept",
    "phalanx.comm.traffic.REPORTED": "of links in a message to a person",
    "phalanx.comm.peers.DEBUG_TEXT": "bytes of a text",
    "phalanx.comm.planned.LARGEST": "no message is longer",
    "phalanx.comm.processes.EXITING": "a flag of the kernel",
    "phalanx.comm.start.PR_SET_PDEATHSIG": "a number of the kernel",
    "phalanx.comm.transports.torch.transport.CUT": "a tag",
    "phalanx._native.CHUNK": "elements per chunk of an update: tests/world/test_fused.py",
    "phalanx._native.SQUARES": "numbers per chunk of an update: tests/world/test_fused.py",
    "phalanx._native.MAX_RANKS": "ranks of a host",
}  # fmt: skip


def sizes(n: int) -> dict[str, list[int]]:
    """By where they come from: sizes in bytes, in a world of n ranks."""
    return {name: of(n) for name, of in THRESHOLDS.items()}


def cells(n: int, *, largest: int = 4 * MIB) -> list[Cell]:
    """All cells of a world of n ranks: each verb with each op and dtype on a few elements, and with each size."""
    found = [*_by_kind(n), *_by_size(n, largest)]
    return list(dict.fromkeys(found))


def huge(n: int) -> list[Cell]:
    """A few cells of 64 MiB."""
    verbs = ("all_reduce", "reduce_scatter", "bcast", "all_reduce in a buffer")
    return [Cell(verb, _op(verb, 0, "float32"), "float32", 16 * MIB // n * n, "64 MiB") for verb in verbs]


def quick(n: int) -> list[Cell]:
    """A part of `cells` that visits every verb, op, dtype and threshold."""
    by_kind = [cell for cell in _by_kind(n) if not cell.verb.startswith("run") or cell.dtype in ("float32", "int64")]
    by_size = [cell for cell in _by_size(n, 3 * MIB) if cell.verb in ("all_reduce", "reduce_scatter", "bcast")]
    rest = [cell for cell in _by_size(n, 3 * MIB) if cell.verb not in ("all_reduce", "reduce_scatter", "bcast")]
    return list(dict.fromkeys([*by_kind, *by_size, *(cell for cell in rest if _lot(cell) % 16 == 0)]))


def _by_kind(n: int) -> Iterator[Cell]:
    for verb, dtype in itertools.product(VERBS, DTYPES):
        for op in OPS if verb in REDUCTIONS else ("sum",):
            if _is_defined(verb, op, dtype):
                yield Cell(verb, op, dtype, 3 * n + 1, "a few")


def _by_size(n: int, largest: int) -> Iterator[Cell]:
    for verb, (why, places) in itertools.product(VERBS[:-1], {**sizes(n), "nothing, one, two": [0]}.items()):
        for k, nbytes in enumerate(places):
            for more in (-1, 0, 1):
                # another dtype and op for each, all of them in turn
                turn = _lot(Cell(verb, why, "", k, "")) + more + n
                dtype = DTYPES[turn % len(DTYPES)] if nbytes <= MIB // 2 else ("float32", "int32", "bfloat16")[turn % 3]
                op = _op(verb, turn, dtype)
                dtype = dtype if _is_defined(verb, op, dtype) else "float32"
                count = nbytes // getattr(torch, dtype).itemsize + more + (nbytes == 0)
                if verb == "alltoall":
                    count = count // n + 1 if nbytes > MIB else count
                cell = Cell(verb, op, dtype, max(0, count), why)
                if cell.nbytes <= largest + 8:
                    yield cell


def _op(verb: str, turn: int, dtype: str) -> str:
    ops = [op for op in OPS if verb in REDUCTIONS and _is_defined(verb, op, dtype)]
    return ops[turn % len(ops)] if ops else "sum"


def _is_defined(verb: str, op: str, dtype: str) -> bool:
    if op == "mean" or verb.startswith("run gossip"):
        return dtype in FLOATS
    return True


def _lot(cell: Cell) -> int:
    return zlib.crc32(repr(cell).encode())

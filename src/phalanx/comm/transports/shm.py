"""Ranks of one host on shared memory: the door to the native core, phalanx._native.

A `HostTeam` is the ranks of a communicator that share a host. Tensors that lie in memory which the team allocated are reduced
where they are, by whoever has time; others pass through a staging area. All ranks make the same calls in the same order, one
thread at a time; `abort()` alone may come from another thread.

    team = HostTeam.join(store, rank, size, timeout=60, name="world/host0")     # None on all ranks where it cannot work
    flat = team.allocate(nbytes).view(torch.float32)
    team.all_reduce(flat, scale=1 / size)
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

log = logging.getLogger("phalanx")

SWITCHED_OFF = "PHALANX_NATIVE=0"

try:
    from phalanx import _native

    UNAVAILABLE = ""
except ImportError as error:
    UNAVAILABLE = f"no native core ({error})"
    if os.environ.get("PHALANX_NATIVE") != "0":  # who switched it off knows
        log.warning("phalanx: %s: ranks of one host talk through torch.distributed; pip install with a C++ compiler", UNAVAILABLE)

# the numbers of csrc/kernels.hpp
TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 8,
}
OPS = {"sum": 0, "max": 1, "min": 2}

# the numbers of csrc/layout.hpp
VERBS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "allocate", "release", "update", "norms", "repair")
OK, DISAGREE, DEAD, LATE, ABORTED, INTERRUPTED, REFUSED, MISUSED = range(8)

TOPIC = 240  # bytes of what a rank says it is about, where ranks disagree
SQUARES = 3  # numbers per chunk of an update: struct ChunkSquares of csrc/team.hpp
METHODS = (0, 1)  # a memfd opened through /proc; a file in /dev/shm, removed as soon as all have mapped it

Reduction = Literal["sum", "mean", "max", "min"]


class SharedMemoryError(RuntimeError):
    """A collective that did not happen. `dead` ranks have ended or left, `late` ones did not come; `author` noticed."""

    def __init__(self, message: str, *, author: int, dead: Sequence[int] = (), late: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.author, self.dead, self.late = author, tuple(dead), tuple(late)


class RankDied(SharedMemoryError):  # noqa: N818  says what happened
    """A process ended, or closed the team; the team is of no more use."""


class RankLate(SharedMemoryError):  # noqa: N818  says what happened
    """Some rank did not come within the timeout; the team is of no more use."""


class Aborted(SharedMemoryError):  # noqa: N818  says what happened
    """abort() was called, or a signal handler raised, on rank `author`; the team is of no more use."""


class Disagreement(SharedMemoryError):  # noqa: N818  says what happened
    """Ranks called different things. Nothing was touched, and the team is as good as before; `late` are the odd ones."""


class Refused(SharedMemoryError):  # noqa: N818  says what happened
    """Memory could not be shared. The team is as good as before."""


class Rule(NamedTuple):
    """How one tensor moves, which has `count` elements from `offset` of the flat buffers.

    As in torch.optim.SGD with dampening 0, or in phalanx.Lars: times the trust ratio where `adapted`, and with the rate inside of
    the velocity if `lr_in_momentum`.
    """

    offset: int
    count: int  # type: ignore[assignment]  # tuple.count is nobody's business here
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    lr_in_momentum: bool = False
    adapted: bool = False
    trust: float = 0.0
    eps: float = 0.0

    @property
    def squares(self) -> int:
        """The float64 numbers that a fused update keeps of an adapted tensor."""
        return SQUARES * -(-self.count // _native.CHUNK)


ADAPTED = Rule._fields.index("adapted")


def update_rules(rules: Sequence[Rule]) -> torch.Tensor:
    """The table of an update, one row per tensor; entries may be changed between updates (lr is column 2)."""
    return torch.tensor([tuple(rule) for rule in rules], dtype=torch.float64).view(-1, len(Rule._fields))


def is_native() -> bool:
    """Whether the native core is there, and wanted."""
    return not UNAVAILABLE and os.environ.get("PHALANX_NATIVE") != "0"


def lars_step(tensors: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], rules: Sequence[Rule]) -> None:
    """Move tensors of this process, each given as parameter, velocity and gradient: dense float32 on the CPU, laid out alike.

    They lie anywhere: offset and count of their rules are not read.
    """
    table = update_rules(rules)
    table[:, 1] = torch.tensor([w.numel() for w, _, _ in tensors])
    where = torch.tensor([[x.data_ptr() for x in each] for each in tensors], dtype=torch.int64)
    _native.lars_step(where.data_ptr(), table.data_ptr(), len(tensors))


class Store(Protocol):
    """The part of a torch.distributed store by which ranks find each other."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


class HostTeam:
    """The ranks of one host that share memory. Made by `join`."""

    def __init__(self, team: Any, rank: int, size: int, timeout: float, pids: Sequence[int]) -> None:
        self.rank, self.size, self.timeout, self._pids = rank, size, timeout, pids
        self._team = team
        self._arenas: dict[int, int] = {}  # address of this rank's part -> id
        self._topic: Callable[[], object] | None = None

    @staticmethod
    def join(store: Store, rank: int, size: int, *, timeout: float, name: str) -> HostTeam | None:
        """Meet the others. None, on all ranks, if they cannot share memory; rank 0 logs the reason."""
        team, reason, pids = _meet(store, rank, size, timeout, f"shm/{name}")
        _forget_meeting(store, rank, size, team, f"shm/{name}")
        if team is None:
            if rank == 0 and SWITCHED_OFF not in reason:  # who did it knows
                log.warning("phalanx: %s: ranks of one host talk through torch.distributed, because %s", name, reason)
            return None
        return HostTeam(team, rank, size, timeout, pids)

    def set_topic(self, digest: int, number: int, text: Callable[[], object]) -> None:
        """What the calls that follow are about. Ranks on which it differs disagree, and tell each other `text`."""
        self._topic = text
        self._team.set_topic(digest, number)

    # ---- memory --------------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Collective: `nbytes` on each rank, zeros, as uint8 and page-aligned. Collectives on views of it copy nothing."""
        return self._allocate(nbytes, one_for_all=False)

    def allocate_one_for_all(self, nbytes: int) -> torch.Tensor:
        """Collective: `nbytes` that all ranks see, and any of them may write. For one replica of parameters per host."""
        return self._allocate(nbytes, one_for_all=True)

    def _allocate(self, nbytes: int, *, one_for_all: bool) -> torch.Tensor:
        status, arena = self._team.allocate(nbytes, int(one_for_all))
        if status:
            raise self._error(status, f"allocate({nbytes})")
        x = torch.frombuffer(arena, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
        self._arenas[x.data_ptr()] = arena.id
        return x

    def release(self, x: torch.Tensor) -> None:
        """Collective: the team forgets what `allocate` returned; it is freed when no tensor on any rank uses it any more."""
        status = self._team.release(self._arenas.pop(x.data_ptr()))
        if status:
            raise self._error(status, "release()")

    def owns(self, x: torch.Tensor) -> bool:
        """Whether a contiguous tensor lies in this rank's part of an arena."""
        return x.is_cpu and self._team.owns(x.data_ptr(), x.nbytes)

    # ---- collectives, in place on contiguous CPU tensors -----------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum", *, scale: float = 1.0) -> torch.Tensor:
        """Reduce `x` over the ranks, in rank order, the same bits on all; `scale` times the sum. Half floats are rounded once."""
        kind, number, scale = self._reduction(x, op, scale)
        status = self._team.all_reduce(x.data_ptr(), x.numel(), kind, number, scale)
        if status:
            raise self._error(status, _text("all_reduce", x, op))
        return x

    def all_reduce_about(
        self, x: torch.Tensor, op: Reduction, digest: int, number: int, text: Callable[[], object]
    ) -> torch.Tensor:
        """`set_topic` and `all_reduce` in one call: a sum of a few KiB takes little longer than two calls from Python."""
        self._topic = text
        kind, operator, scale = self._reduction(x, op, 1.0)
        status = self._team.all_reduce(x.data_ptr(), x.numel(), kind, operator, scale, digest, number)
        if status:
            raise self._error(status, _text("all_reduce", x, op))
        return x

    def begin_all_reduce(self, x: torch.Tensor, op: Reduction = "sum", *, scale: float = 1.0) -> int:
        """Count this rank in and return at once; `finish` with the ticket. `x` lies in an arena, and is left alone until then.

        Ranks that wait, for whatever ticket, do the work. At most 16 begun and not finished.
        """
        kind, number, scale = self._reduction(x, op, scale)
        status, ticket = self._team.begin_all_reduce(x.data_ptr(), x.numel(), kind, number, scale)
        if status:
            raise self._error(status, _text("begin_all_reduce", x, op))
        return ticket

    def finish(self, ticket: int) -> None:
        """Help with a begun all-reduce, and wait for its end."""
        status = self._team.finish(ticket)
        if status:
            raise self._error(status, f"finish({ticket})")

    def reduce_scatter(self, x: torch.Tensor, op: Reduction = "sum", *, scale: float = 1.0) -> torch.Tensor:
        """Reduce this rank's part of `x` where it is, and return it, flat; the other parts are left as they are."""
        kind, number, scale = self._reduction(x, op, scale)
        status = self._team.reduce_scatter(x.data_ptr(), x.numel(), kind, number, scale)
        if status:
            raise self._error(status, _text("reduce_scatter", x, op))
        return self.part(x, self.rank)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Fill part r of `x` from rank r."""
        status = self._team.all_gather(_address(x), x.numel(), TYPES[x.dtype])
        if status:
            raise self._error(status, _text("all_gather", x))
        return x

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        """Fill `x` from rank `root`."""
        status = self._team.broadcast(_address(x), x.numel(), TYPES[x.dtype], root)
        if status:
            raise self._error(status, _text("broadcast", x))
        return x

    def tell(self, text: str) -> list[str]:
        """The texts of all ranks, TOPIC bytes of each at most."""
        said = torch.zeros(self.size, TOPIC, dtype=torch.uint8)
        words = text.encode()[:TOPIC]
        said[self.rank, : len(words)] = torch.tensor(list(words), dtype=torch.uint8)
        status = self._team.all_gather(said.data_ptr(), said.numel(), TYPES[said.dtype])
        if status:
            author, dead, late, _, _ = self._team.failure()
            raise SharedMemoryError("tell()", author=author, dead=dead, late=late)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        status = self._team.barrier()
        if status:
            raise self._error(status, "barrier()")

    def part(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of `x`, flat, that belongs to `rank`: cut as a schedule cuts it, no padding."""
        n = x.numel()
        return x.view(-1)[rank * n // self.size : (rank + 1) * n // self.size]

    def _reduction(self, x: torch.Tensor, op: str, scale: float) -> tuple[int, int, float]:
        if not (x.is_contiguous() and x.is_cpu):
            raise ValueError(f"shared memory wants contiguous CPU tensors, got strides {x.stride()} on {x.device}")
        if op == "mean":
            return TYPES[x.dtype], 0, scale / self.size
        if op == "sum" and x.dtype is torch.bool:
            op = "max"  # a sum of truths is their `or`
        return TYPES[x.dtype], OPS[op], scale

    # ---- the fused update ------------------------------------------------------------------------------------------------------

    def update(
        self,
        gradients: torch.Tensor,
        parameters: torch.Tensor,
        velocities: torch.Tensor,
        rules: torch.Tensor,
        *,
        scale: float,
        squares: torch.Tensor | None = None,
        carry: bool = False,
    ) -> None:
        """Move the parameters of the whole host by `scale` times the sum of all ranks' gradients, which are only read.

        Flat float32 of one layout: `gradients` from `allocate`, the others from `allocate_one_for_all`; `rules` are made by
        `update_rules`, the same on all ranks. Where a tensor is adapted `squares`, from `allocate_one_for_all` as well, has room
        for the `Rule.squares` of all tensors. `carry`: take the norms of the parameters from there, as the last update of the
        same tensors has left them; who wrote to the parameters meanwhile does not have to tell. When it returns, all ranks see
        the new parameters.
        """
        if not (
            rules.dtype is torch.float64 and rules.is_contiguous() and rules.dim() == 2 and rules.shape[1] == len(Rule._fields)
        ):
            raise ValueError(f"rules are what update_rules() returns, got {rules.dtype} {tuple(rules.shape)}")
        end = int((rules[:, 0] + rules[:, 1]).max()) if len(rules) else 0
        for x in (gradients, parameters, velocities):
            if x.dtype is not torch.float32 or not x.is_contiguous() or x.numel() < end:
                raise ValueError(
                    f"a fused update wants contiguous float32 of at least {end} elements, got {x.dtype}[{x.numel()}]"
                )
        room = 0 if squares is None else squares.numel()
        needed = SQUARES * int(((rules[:, 1] + _native.CHUNK - 1) // _native.CHUNK).sum()) if bool(rules[:, ADAPTED].any()) else 0
        if room < needed or (squares is not None and not (squares.dtype is torch.float64 and squares.is_contiguous())):
            raise ValueError(f"these rules want {needed} contiguous float64 for squares, got {room}")
        g, w, v, table = (each.data_ptr() for each in (gradients, parameters, velocities, rules))
        kept = 0 if squares is None else squares.data_ptr()
        status = self._team.update(g, w, v, kept, int(carry), table, len(rules), scale)
        if status:
            raise self._error(status, f"update({len(rules)} tensors)")

    # ---- the end ---------------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """From any thread: what this rank waits for, and whatever it calls later, fails within 50 ms; the others learn it."""
        self._team.abort()

    def close(self) -> None:
        """Leave the team; who calls it after this gets an error. Tensors stay valid. Idempotent."""
        self._team.leave()

    def _error(self, status: int, call: str) -> RuntimeError:
        if status == MISUSED:
            return RuntimeError(f"{call}: more than {_native.DEPTH} operations begun, or a ticket that is not open")
        author, dead, late, calls, refusal = self._team.failure()
        if status == REFUSED:
            return Refused(f"{call}: {refusal}", author=author)
        if status == DISAGREE:
            return _disagreement(call, author, calls, self._tell_topics())
        told = "" if author == self.rank else f" (noticed by rank {author})"
        if status == DEAD:
            _sweep([self._pids[r] for r in dead])
            return RankDied(f"{call}: {_ranks(dead)} ended or left{told}", author=author, dead=dead)
        if status == LATE:
            return RankLate(f"{call}: {_ranks(late)} did not come within {self.timeout:g} s{told}", author=author, late=late)
        why = "a signal handler raised" if status == INTERRUPTED else "abort() was called"
        return Aborted(f"{call}: {why} on rank {author}", author=author, late=() if author == self.rank else (author,))

    def _tell_topics(self) -> list[str]:
        """What each rank is about, after a disagreement: all ranks learned of it in the same operation, so all come here."""
        if self._topic is None:
            return []
        self._team.set_topic(0, 0)
        try:
            return self.tell(str(self._topic()))
        except SharedMemoryError:
            return []  # a rank died meanwhile: the disagreement is told without words


def _address(x: torch.Tensor) -> int:
    if not (x.is_contiguous() and x.is_cpu):
        raise ValueError(f"shared memory wants contiguous CPU tensors, got strides {x.stride()} on {x.device}")
    return x.data_ptr()


def _text(verb: str, x: torch.Tensor, op: str = "") -> str:
    return f"{verb}({str(x.dtype).removeprefix('torch.')}[{x.numel()}]{', ' + op if op else ''})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _disagreement(
    call: str, author: int, calls: Sequence[tuple[int, int, int, int, int, int, int, int, float]], topics: Sequence[str] = ()
) -> Disagreement:
    """Who called what; the odd ones are those outside of the largest party."""
    names = {number: str(dtype).removeprefix("torch.") for dtype, number in TYPES.items() if dtype is not torch.bool}
    parties: dict[str, list[int]] = {}
    for rank, (verb, kind, op, staged, root, count, arena, offset, scale) in enumerate(calls):
        where = (
            "" if all(call[3] for call in calls) else " in memory of its own" if staged else f" at byte {offset} of arena {arena}"
        )
        how = {4: f", root {root}", 1: f", {list(OPS)[op]}", 2: f", {list(OPS)[op]}"}.get(verb, "")
        scaled = f" x {scale:g}" if scale != 1.0 else ""
        what = f"{names[kind]}[{count}]{how}{scaled}{where}" if 0 < verb < 5 else str(count or "")
        parties.setdefault(f"{VERBS[verb]}({what})", []).append(rank)
    if len(set(topics)) > 1:  # what users called, rather than what it became here
        parties = {topic: [rank for rank in range(len(topics)) if topics[rank] == topic] for topic in topics}
    usual = max(parties.values(), key=len)
    odd = sorted(rank for ranks in parties.values() if ranks is not usual for rank in ranks)
    told = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in parties.items())
    return Disagreement(f"{call}: ranks disagree: {told}", author=author, late=odd)


# ---- meeting -------------------------------------------------------------------------------------------------------------------


def _meet(store: Store, rank: int, size: int, timeout: float, name: str) -> tuple[Any, str, list[int]]:
    """The team after all have mapped its control segment, or None and the reason, the same on all ranks; and their processes.

    Every phase is: all tell, all read what all told, all come to the same conclusion.
    """

    def share(key: str, mine: str) -> list[str]:
        keys = [f"{name}/{key}/{r}" for r in range(size)]
        store.set(keys[rank], mine)
        _wait(store, keys, timeout, f"join of {name}", rank)
        return [text.decode() for text in store.multi_get(keys)]

    told = [json.loads(text) for text in share("hello", json.dumps(_identity()))]
    for what, words in (
        ("unavailable", "{value} on {who}"),
        ("kernel", "{who} runs on another kernel than rank 0"),
        ("pids", "{who} lives in another pid namespace (container) than rank 0"),
        ("layout", "{who} runs another build of the native core than rank 0"),
    ):
        expected = "" if what == "unavailable" else told[0][what]
        odd = [r for r in range(size) if told[r][what] != expected]
        if odd:
            return None, words.format(who=_ranks(odd), value=told[odd[0]][what]), []
    if size > _native.MAX_RANKS:
        return None, f"{size} ranks are more than {_native.MAX_RANKS}", []
    pids = [int(own["pid"]) for own in told]

    reasons = []
    for method in METHODS:
        team: Any = None
        place, reason = "", ""
        if rank == 0:
            team, reason = _enter(rank, size, None, method, timeout)
            place = team.place if team is not None else ""
        place = share(f"place{method}", place)[0]
        if rank != 0 and place:
            team, reason = _enter(rank, size, place, method, timeout)
        answers = share(f"mapped{method}", reason)
        if place and not any(answers):
            team.meet()
            return team, "", pids
        reasons.append(next(f"rank {r} cannot: {answer}" for r, answer in enumerate(answers) if answer))
        del team  # and with it the segment, the descriptor and the name
    return None, "; ".join(reasons), []


def _forget_meeting(store: Store, rank: int, size: int, team: Any, name: str) -> None:
    """Take out of the store what the ranks told each other, after all have read it."""
    phases = ["hello", *(f"{phase}{method}" for method in METHODS for phase in ("place", "mapped"))]
    ranks: Sequence[int] = [rank]
    if team is None:  # the last to come does it for all
        store.set(f"{name}/left/{rank}", "")
        if not store.check([f"{name}/left/{r}" for r in range(size)]):
            return
        phases.append("left")
        ranks = range(size)
    elif team.barrier():
        return  # a rank died: it will be noticed
    for key in (f"{name}/{phase}/{r}" for phase in phases for r in ranks):
        store.delete_key(key)


def _enter(rank: int, size: int, place: str | None, method: int, timeout: float) -> tuple[Any, str]:
    try:
        return _native.Team(rank, size, place, method, timeout), ""
    except OSError as error:
        return None, str(error)


def _identity() -> dict[str, str]:
    """What must be equal on ranks that share memory, and why this one cannot."""
    unavailable = SWITCHED_OFF if os.environ.get("PHALANX_NATIVE") == "0" else UNAVAILABLE
    if unavailable:
        return {"unavailable": unavailable, "kernel": "", "pids": "", "layout": "", "pid": "0"}
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        return {"unavailable": f"no /proc ({error})", "kernel": "", "pids": "", "layout": "", "pid": "0"}
    return {"unavailable": "", "kernel": kernel, "pids": pids, "layout": _native.LAYOUT, "pid": str(os.getpid())}


def _sweep(pids: Sequence[int]) -> None:
    """Remove the names that these dead processes had given to memory and, killed in between, did not take back."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"phalanx-{pid}-*"):
            with contextlib.suppress(OSError):  # another survivor was faster
                path.unlink()


def _wait(store: Store, keys: list[str], timeout: float, what: str, rank: int) -> None:
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError:
        late = [r for r, key in enumerate(keys) if not _has(store, key)]
        if not late:
            return
        raise RankLate(f"{what}: {_ranks(late)} did not come within {timeout:g} s", author=rank, late=late) from None


def _has(store: Store, key: str) -> bool:
    try:
        store.wait([key], datetime.timedelta(milliseconds=10))
    except RuntimeError:
        return False
    return True

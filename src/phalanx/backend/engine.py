"""The accelerated collectives of a group: one call of the native core on a single host, a schedule across hosts.

The lane runs these functions one at a time. All ranks must choose the same path, so the choice depends only on what all of them
know: dtype, size, operation and hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from phalanx.backend.meeting import Table, gather, roll_call
from phalanx.comm.choose import choose
from phalanx.comm.envelope import bytes_of
from phalanx.comm.failure import CommunicationError
from phalanx.comm.hosts import host_key
from phalanx.comm.issuer import Issuer
from phalanx.comm.members import Members
from phalanx.comm.operations import Operations, digest_of, tag_of
from phalanx.comm.runner import Runner
from phalanx.comm.transports import Transport, TransportError
from phalanx.comm.transports.shared import SharedTransport
from phalanx.comm.transports.torch.gloo import GlooTransport
from phalanx.comm.verdict import name_ranks
from phalanx.native.core import TYPES
from phalanx.native.errors import Disagreement, RankLate, Refused, SharedMemoryError
from phalanx.native.team import HostTeam, Reduction
from phalanx.schedule import Schedule

# Measured on 2 cores: an all-reduce takes 20 us at 64 KiB, but 330 us if it has to wake another thread; 170 and 640 us at 1 MiB
SHORT = 4 << 20  # bytes; up to here the calling thread runs the all-reduce itself if it can
MOMENT = 200e-6  # seconds that an asynchronous call may wait for the other ranks


class About(NamedTuple):
    """One kind of all-reduce, for calls that repeat it."""

    key: object  # dtype, count and operation
    codes: tuple[int, int, float] | None = None  # of the core, if one call of it is enough
    digest: int = 0  # of the name
    name: str = ""
    text: Callable[[], str] = str  # returns the name


class Engine:
    """The ranks of one group, connected. `team` is the shared memory of this host's ranks, if they have any."""

    def __init__(self, members: Members, team: HostTeam | None, store: Table, timeout: float) -> None:
        self.members, self.team, self._store, self._timeout = members, team, store, timeout
        self.team_of_all = team if members.inter_size == 1 else None  # the shared memory, if all ranks are on this host
        self.number = 0  # of the latest operation
        self._between: Between | None = None
        self._about = About(None)  # the last all-reduce

    def connect_hosts(self, gloo: Any, algorithm: Schedule | None, *, shared: bool) -> None:
        """From now on, run all-reduces as schedules. `shared`: every host has shared memory."""
        self._between = Between(self.members, self.team, gloo, algorithm, self._timeout, shared=shared)

    @property
    def algorithm(self) -> Schedule | None:
        """The schedule of all-reduces of more than a few KiB, or None if they are one call of the core."""
        return None if self._between is None else self._between.large

    def can_reduce(self, x: torch.Tensor, op: str | None) -> bool:
        """Whether this engine can all-reduce `x`."""
        if self._between is None and self.team is None:
            return False  # without shared memory, gloo's own all-reduce beats a schedule of gloo messages
        if op is None or not x.is_cpu or x.layout is not torch.strided or x.dtype not in TYPES:
            return False
        return op != "mean" or x.is_floating_point()

    def about(self, x: torch.Tensor, op: str) -> About:
        """Describe an all-reduce. Reuses the last value if it matches, because comparing is faster than a lookup. Thread-safe."""
        key, about = (x.dtype, x.numel(), op), self._about
        if key != about.key:
            digest, name = _named("all_reduce", *key)
            codes = None if self.team_of_all is None else self.team_of_all.codes(x.dtype, op)
            about = self._about = About(key, codes, digest, name, lambda: name)
        return about

    # ---- collectives -------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: Reduction, about: About | None = None) -> None:
        """All-reduce `x` in place. Pass `about` if you already have it."""
        self.number = number = self.number + 1
        if self._between is None and x.is_contiguous():
            self._in_one_call(x, op, about or self.about(x, op), number)
            return
        x = x.detach()
        flat = x if x.is_contiguous() else x.contiguous()
        if self._between is not None:
            self._between.all_reduce(flat, op, number)
        else:
            self._in_one_call(flat, op, self.about(flat, op), number)
        if flat is not x:
            x.copy_(flat)

    def _in_one_call(self, x: torch.Tensor, op: Reduction, about: About, number: int) -> None:
        team = self.team_of_all
        assert team is not None
        team.all_reduce_about(x, op, (about.digest, number, about.text), about.codes)

    def begins(self, x: torch.Tensor) -> bool:
        """Whether the thread that calls an all-reduce of `x` should `begin` it instead of handing it over.

        Not a long one: the rank that arrives last would have to wait for threads that share its cores.
        """
        return self._between is None and self.team_of_all is not None and x.nbytes <= SHORT and x.is_contiguous()

    def begin(self, x: torch.Tensor, op: Reduction, about: About) -> Callable[[], None] | None:
        """Run an all-reduce if all ranks arrive within a moment. Otherwise return the rest of it, which must run next."""
        team = self.team_of_all
        assert team is not None
        self.number += 1
        number = self.number
        if team.all_reduce_about(x, op, (about.digest, number, about.text), about.codes, MOMENT):
            return None
        return lambda: self._in_one_call(x, op, about, number)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, op: Reduction) -> None:
        """Write rank r's part of the reduced `whole` to `out`. `whole` is unchanged on return."""
        team = self._begin("reduce_scatter", whole, op)
        flat = whole.detach().contiguous().view(-1)
        mine, out = team.part(flat, team.rank), out.detach()
        kept = None if flat.data_ptr() != whole.data_ptr() or _same_place(mine, out) else mine.clone()
        team.reduce_scatter(flat, op)
        if not _same_place(mine, out):
            out.copy_(mine.view(out.shape))
        if kept is not None:
            mine.copy_(kept)

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        """Fill part r of the contiguous `out` from rank r's `mine`."""
        team = self._begin("all_gather", mine)
        flat = bytes_of(out.detach())
        part = team.part(flat, team.rank)
        if part.data_ptr() != mine.data_ptr():
            part.copy_(bytes_of(mine.detach().contiguous()))
        team.all_gather(flat)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """Fill `x` from rank `root`."""
        team = self._begin("broadcast", x, f"root {root}")
        x = x.detach()
        dense = x if x.is_contiguous() else x.contiguous()
        team.broadcast(bytes_of(dense), root)
        if dense is not x and team.rank != root:
            x.copy_(dense)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        team = self._begin("barrier", torch.empty(0))
        team.barrier()

    def _begin(self, verb: str, x: torch.Tensor, how: str = "") -> HostTeam:
        team = self.team_of_all
        assert team is not None
        self.number += 1
        digest, name = _named(verb, x.dtype, x.numel(), how)
        team.set_topic(digest, self.number, lambda: name)
        return team

    # ---- failure -----------------------------------------------------------------------------------------------------------

    def explain(self, name: str, error: BaseException) -> tuple[BaseException, bool]:
        """Return the error to show to users, and whether it breaks the group."""
        if isinstance(error, SharedMemoryError):
            host = self.members.on_this_host
            missing = [host[r] for r in (*error.dead, *error.late)]
            words = str(error)
            if isinstance(error, RankLate):  # programs match gloo's wording
                words = f"{name}: Timed out waiting for {name_ranks(missing)}, which did not come within {self._timeout:g} s"
            return CommunicationError(words, operation=name, missing=missing), not isinstance(error, Disagreement | Refused)
        if isinstance(error, TransportError):
            missing = roll_call(self._store, self.members.rank, self.members.size, self.number, self._timeout)
            who = f"; {name_ranks(missing)} did not report" if missing else ""
            return CommunicationError(f"{name} failed: {error}{who}", operation=name, missing=missing), True
        return error, False

    def abort(self) -> None:
        """End this rank's current wait. Thread-safe."""
        if self.team is not None:
            self.team.abort()

    def close(self) -> None:
        """Leave the shared memory. Idempotent."""
        if self.team is not None:
            self.team.close()
        self._between = None


class Between:
    """All-reduces across hosts: picks the schedule that fits the hosts and the message size."""

    def __init__(
        self, members: Members, team: HostTeam | None, gloo: Any, algorithm: Schedule | None, timeout: float, *, shared: bool
    ) -> None:
        self._members = members
        choice = choose(members.hosts, shared=shared)
        self.large = algorithm or choice.schedule
        self._smaller = choice.smaller if algorithm is None else choice.smaller[:1]  # yours runs all but tiny messages
        transport: Transport = GlooTransport(gloo, timeout)
        if team is not None:
            transport = SharedTransport(transport, team, members.on_this_host)
            if members.inter_size > 1:
                team.set_long_pieces()  # the network is the bottleneck then, and it idles during every meeting
        operations = Operations(members, transport, Issuer(timeout, None), team=team)
        self._runner = Runner(operations, shared=shared)

    def all_reduce(self, x: torch.Tensor, op: str, number: int) -> None:
        """In place on a contiguous tensor."""
        schedule = next((each for limit, each in self._smaller if x.nbytes <= limit), self.large)
        tag = tag_of(self._members.name, number, x.dtype, x.numel(), op)
        flat, size = x.view(-1), self._members.size
        if x.dtype is torch.bool:  # the sum of booleans is their `or`
            flat, op = flat.view(torch.uint8), "max" if op == "sum" else op
        if op == "mean" and x.dtype is torch.float16:
            flat.div_(size)  # divide before the wire: fp16 sums of 1024 ranks overflow
        self._runner.run(schedule, flat, "sum" if op == "mean" else op, tag)
        if op == "mean" and x.dtype is not torch.float16:
            flat.div_(size)


def connect(store: Any, rank: int, size: int, timeout: float, algorithm: Schedule | None, name: str, make_gloo: Any) -> Engine:
    """Connect the ranks of a group. `make_gloo` creates the gloo group for schedules, if they are needed."""
    table = Table(store)
    keys = gather(table, "host", rank, size, host_key(), timeout, "init_process_group")
    members = Members(name, tuple(range(size)), rank, tuple(keys))
    width = len(members.on_this_host)
    team = None
    if width > 1:
        try:
            team = HostTeam.join(table, members.intra_rank, width, timeout=timeout, name=f"{name}/{members.inter_rank}")
        except SharedMemoryError as error:
            missing = [members.on_this_host[r] for r in (*error.dead, *error.late)]
            words = f"init_process_group: {name_ranks(missing)} did not join the shared memory of this host: {error}"
            raise CommunicationError(words, operation="init_process_group", missing=missing) from error
    # all ranks must decide the same, or they would run different schedules
    answers = gather(table, "shared", rank, size, str(team is not None or width == 1), timeout, "init_process_group")
    shared = max(len(ranks) for ranks in members.hosts.ranks) > 1 and "False" not in answers
    if team is not None and not shared:
        team.close()
        team = None
    engine = Engine(members, team, table, timeout)
    if members.inter_size > 1 or algorithm is not None:
        engine.connect_hosts(make_gloo(), algorithm, shared=shared)
    return engine


@functools.lru_cache(maxsize=1024)
def _named(verb: str, dtype: torch.dtype, count: int, how: str) -> tuple[int, str]:
    name = f"{verb}({str(dtype).removeprefix('torch.')}[{count}]{', ' + how if how else ''})"
    return digest_of(name), name


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()

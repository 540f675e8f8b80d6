"""The communicator: MPI's verbs on tensors and plain objects, with a bounded wait and an error that names who is missing.

Every verb checks its arguments in the calling thread, then becomes one numbered `Operation` on the issuing thread. The
all-reduce runs a schedule; the others are a few messages each. A tag made from number, verb and shape keeps operations apart:
ranks that disagree wait for each other in vain, and the watch can say who called what.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from phalanx.comm.arguments import (
    check_in_place,
    check_list,
    check_op,
    check_peer,
    check_rank,
    check_reduction,
    check_tensor,
    kind_of,
    text_of,
)
from phalanx.comm.choose import for_less, for_world
from phalanx.comm.envelope import HEADER, announced, describes, header_of, is_plain, pack, plain, unpack
from phalanx.comm.failure import CommunicationError, Watch, release
from phalanx.comm.hosts import Hosts
from phalanx.comm.issuer import Issuer, Operation, Pending
from phalanx.comm.loans import Loans
from phalanx.comm.run import LANES, Form, execute
from phalanx.comm.streams import Lane
from phalanx.comm.transports import Message, Transport
from phalanx.comm.transports.shared import SharedTransport
from phalanx.comm.transports.shm import TYPES, Disagreement, HostTeam, Refused, Rule, update_rules
from phalanx.schedule import Collective, Schedule, ScheduleError, Step, binomial, lower, scatter_gather, verify

ReduceOp = Literal["sum", "mean", "max", "min"]
Share = Callable[[str, int, int], HostTeam | None]  # (name, rank and size on this host) -> shared memory, where it is possible

WINDOW = 32  # peers with whom a rank exchanges at a time where it must talk to all
KEEP = 64 << 20  # bytes of scratch kept between operations
DEBUG_TEXT = 240  # bytes of an operation's name that ranks compare under PHALANX_DEBUG
BCAST_TREE = 64 << 10  # bytes up to which a broadcast sends the whole along a tree rather than parts


class Communicator:
    """A set of ranks that communicate; made by `create_communicator`, `run_local` or `split`."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        me: int,
        transport: Transport,
        issuer: Issuer,
        watch: Watch | None,
        keys: Sequence[str],
        algorithm: Schedule | None,
        *,
        parent: Communicator | None = None,
        share: Share | None = None,
    ) -> None:
        self._name, self._ranks, self._rank = name, tuple(ranks), me
        self._transport, self._issuer, self._watch, self._parent = transport, issuer, watch, parent
        self._keys = tuple(keys)
        self._hosts = Hosts.of(self._keys)
        self._inter_rank, self._intra_rank = self._hosts.place(me)
        self._number = 0
        self._splits = 0
        self._closed = False
        self._debug = os.environ.get("PHALANX_DEBUG", "") not in ("", "0")
        self._scattering = _scattering(self.size)
        self._broadcasts: dict[tuple[str, int], Schedule] = {}
        self._forms: dict[tuple[int, torch.dtype, str], Form] = {}
        self._verified: dict[int, Schedule] = {}
        self._room: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}
        self._algorithm, self._share = algorithm, share
        self._team: HostTeam | None = None
        self._loans: Loans | None = None
        self._shared = self._share_memory()  # on all hosts, so that all ranks run one schedule
        shared = self._shared
        self._schedule = algorithm or for_world(self._hosts, shared=shared, library=transport.library)
        smaller = for_less(self._hosts, shared=shared)
        self._small = smaller[0][1]
        self._smaller = smaller if algorithm is None else smaller[:1]  # the user's own serves all but what is very small
        # all ranks share memory, and nobody asked for a certain schedule: no schedule is needed
        self._direct = self._team if algorithm is None and self.inter_size == 1 else None

    def _share_memory(self) -> bool:
        """Make shared memory with the ranks of this host, and tell whether that worked on all hosts."""
        if self._share is None or max(len(ranks) for ranks in self._hosts.ranks) == 1:
            return False
        team = None
        if self.intra_size > 1:
            team = self._share(f"{self._name}/{self._inter_rank}", self._intra_rank, self.intra_size)
        works = team is not None or self.intra_size == 1
        if self.inter_size > 1:
            works = all(self.allgather_obj(works))
        if team is not None and not works:
            team.close()
        elif team is not None:
            host = [self._ranks[rank] for rank in self._hosts.ranks[self._inter_rank]]
            self._team, self._transport = team, SharedTransport(self._transport, team, host)
            self._loans = Loans(team)
            if self._watch is not None:
                self._watch.interrupts.append(team.abort)
        return works

    # ---- who ---------------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def intra_rank(self) -> int:
        """The number of this rank among those of its host."""
        return self._intra_rank

    @property
    def intra_size(self) -> int:
        """How many ranks share this host."""
        return len(self._hosts.ranks[self._inter_rank])

    @property
    def inter_rank(self) -> int:
        """The number of this host."""
        return self._inter_rank

    @property
    def inter_size(self) -> int:
        """How many hosts there are."""
        return len(self._hosts.ranks)

    @property
    def schedule(self) -> Schedule:
        """What an all-reduce of more than a few KiB executes."""
        return self._schedule

    @property
    def patience(self) -> float:
        """Seconds without progress after which a wait is given up: the timeout, less what it takes to find out why."""
        return self._issuer.patience

    def __repr__(self) -> str:
        return f"<Communicator {self._name}: rank {self.rank} of {self.size}, {self.inter_size} host(s), {self.schedule.name}>"

    # ---- reductions --------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Sum (mean, max, min) of `x` over the ranks, in place; returns `x`."""
        if self._direct is not None and self._issuer.idle and not self._debug and _is_simple(x, op) and not self._is_closed():
            # in this thread, at the speed of memory: a thread's wake-up takes longer than all ranks' sum of a few KiB
            self._number += 1
            number, team, dtype, shape = self._number, self._direct, x.dtype, x.shape

            def describe() -> Operation:  # keeps no tensor alive
                name = f"all_reduce({kind_of(dtype, shape)}, {op})"
                return Operation(self._name, number, name, self._members(), lambda: None, Lane())

            return self._issuer.directly(lambda: self._on_team(lambda: team.all_reduce(x, op)), describe)
        self.all_reduce_async(x, op).wait()
        return x

    def all_reduce_async(self, x: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start an all-reduce; leave `x` alone until `wait()`, which returns it."""
        check_reduction(x, op)
        check_in_place(x)
        schedule = self._schedule_for(x)

        def work(tag: int) -> torch.Tensor:
            self._reduce(x.detach(), op, schedule, tag)
            return x

        return self._start(f"all_reduce({text_of(x)}, {op})", work, [x])

    def _schedule_for(self, x: torch.Tensor) -> Schedule:
        if x.is_cuda and self._transport.library:
            return self._schedule  # NCCL has its own way with small messages
        return next((schedule for limit, schedule in self._smaller if x.nbytes <= limit), self._schedule)

    def run(self, schedule: Schedule, x: torch.Tensor) -> torch.Tensor:
        """Execute any schedule for this world on `x`, in place, whatever its size; returns `x`. It is verified the first time."""
        check_reduction(x, "sum")
        check_in_place(x)
        if schedule.world != self.size:
            raise ScheduleError(f"{schedule.name} is for {schedule.world} ranks, but this communicator has {self.size}")
        if not is_plain(x) or not self._transport.can_carry(x):
            raise ValueError(f"run wants a contiguous tensor on a device of the backend, got {text_of(x)} on {x.device}")
        if id(schedule) not in self._verified:
            verify(schedule)
            verify(lower(schedule))
            self._verified[id(schedule)] = schedule

        def work(tag: int) -> torch.Tensor:
            self._run(schedule, x.detach().view(-1), "sum", tag)
            return x

        return self._start(f"run({schedule.name}, {text_of(x)})", work, [x]).wait()

    def reduce_scatter(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce `x`, cut along dim 0 into `size` parts, and return this rank's part; `x` itself is not changed."""
        check_reduction(x, op)
        if x.dim() == 0 or x.shape[0] % self.size:
            raise ValueError(f"reduce_scatter cuts dim 0 into {self.size} equal parts, but the shape is {tuple(x.shape)}: pad it")

        def work(tag: int) -> torch.Tensor:
            whole = x.detach().clone(memory_format=torch.contiguous_format)
            self._reduce(whole, op, self._scattering, tag)
            return whole.chunk(self.size)[self.rank].clone() if whole.numel() else whole[: x.shape[0] // self.size]

        return self._start(f"reduce_scatter({text_of(x)}, {op})", work, [x]).wait()

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        if self._direct is not None:
            team = self._direct
            self._start("barrier()", lambda tag: team.barrier()).wait()
        else:
            self._start("barrier()", lambda tag: self._reduce(torch.zeros(1), "sum", self._small, tag)).wait()

    def _reduce(self, x: torch.Tensor, op: str, schedule: Schedule, tag: int) -> None:
        """In place, for any layout and device."""
        if not self._transport.can_carry(x) or not is_plain(x):
            dense = plain(x if self._transport.can_carry(x) else x.cpu())
            self._reduce(dense, op, schedule, tag)
            x.copy_(dense)
            return
        if self._direct is not None and schedule is not self._scattering and x.dtype in TYPES:
            self._direct.all_reduce(x, op)
            return
        flat = x.view(-1)
        if x.dtype is torch.bool:  # a sum of truths is their `or`
            flat, op = flat.view(torch.uint8), "max" if op == "sum" else op
        if op == "mean" and x.dtype is torch.float16:
            flat.div_(self.size)  # divide before the wire: fp16 sums of 1024 ranks overflow
        self._run(schedule, flat, "sum" if op == "mean" else op, tag)
        if op == "mean" and x.dtype is not torch.float16:
            flat.div_(self.size)

    def _run(self, schedule: Schedule, flat: torch.Tensor, op: str, tag: int) -> None:
        form = self._form(schedule, flat)
        if form.cut and flat.numel() % schedule.chunks:
            # library calls want equal parts; Moves do not. Gradients never come here: their arena is padded once
            padded = flat.new_zeros(-(-flat.numel() // schedule.chunks) * schedule.chunks)
            padded[: flat.numel()] = flat
            self._run(schedule, padded, op, tag)
            flat.copy_(padded[: flat.numel()])
            return
        execute(
            form.parts,
            schedule.chunks,
            form.pieces(flat),
            op=op,
            me=self.rank,
            transport=self._transport,
            ranks=self._ranks,
            tag=tag,
            scratch=self._scratch,
            got_on=self._issuer.got_on,
        )

    def _form(self, schedule: Schedule, flat: torch.Tensor) -> Form:
        """How the schedule runs on tensors like `flat`: what the transport can do as one call stays one, the rest is lowered."""
        key = (id(schedule), flat.dtype, flat.device.type)
        if key not in self._forms:
            lowered = lower(schedule, keep=lambda call: self._transport.calls(call, flat, self._ranks))
            self._forms[key] = Form.of(schedule, lowered, self.rank, calls=self._shared or self._transport.library)
        return self._forms[key]

    def _scratch(self, count: int, like: torch.Tensor, lane: int) -> torch.Tensor:
        """Room for `count` elements next to a piece of the user's buffer; only the issuing thread asks."""
        key = (like.dtype, like.device, lane)
        room = self._room.get(key)
        if room is None or room.numel() < count:
            room = torch.empty(count, dtype=like.dtype, device=like.device)
            if room.nbytes <= KEEP:
                self._room[key] = room
        return room

    @property
    def multiple(self) -> int:
        """Buffers whose length is a multiple of this many elements need no padding."""
        return self._schedule.chunks * LANES

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        """A flat tensor in the memory that this communicator reduces fastest, not initialised. All ranks call it together."""
        team, loans = self._team, self._loans
        if team is None or loans is None or numel == 0 or dtype not in TYPES or torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize

        def work(tag: int) -> torch.Tensor:
            try:
                return loans.give(lambda: team.allocate(nbytes)).view(dtype)
            except Refused:  # on all ranks of the host alike: their memory limit, most likely
                return torch.empty(numel, dtype=dtype)

        return self._start(f"buffer({nbytes} bytes)", work).wait()

    # ---- one replica per host ------------------------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host and share memory."""
        return self._team is not None and self.inter_size == 1

    def shared_buffer(self, numel: int) -> torch.Tensor:
        """Flat float32 zeros that all ranks see and any of them may write. All ranks call it together; needs `shares_memory`."""
        team = self._need_shared_memory("shared_buffer")
        loans = self._loans
        assert loans is not None
        work = lambda tag: loans.give(lambda: team.allocate_one_for_all(numel * 4)).view(torch.float32)  # noqa: E731
        return self._start(f"shared_buffer({numel})", work).wait()

    def update(self, gradients: torch.Tensor, parameters: torch.Tensor, velocities: torch.Tensor, rules: Sequence[Rule]) -> None:
        """Move shared `parameters` and `velocities` by the mean of all ranks' `gradients`, in one pass over the memory.

        `gradients` are from `buffer`, the others from `shared_buffer`, all of one layout, which `rules` (the same on all ranks)
        describes, tensor by tensor. The gradients are only read.
        """
        team = self._need_shared_memory("update")
        table = update_rules(rules)
        work = lambda tag: team.update(gradients, parameters, velocities, table, scale=1 / self.size)  # noqa: E731
        self._start(f"update({len(rules)} tensors)", work).wait()

    def _need_shared_memory(self, verb: str) -> HostTeam:
        if self._team is None or self.inter_size > 1:
            raise RuntimeError(f"{verb}: the ranks of this communicator do not all share memory (comm.shares_memory tells)")
        return self._team

    # ---- tensors whose shape the receiver does not know -----------------------------------------------------------------------

    def bcast(self, x: torch.Tensor | None, root: int = 0) -> torch.Tensor:
        """The tensor of `root`, on all ranks. Receivers pass None, or a tensor of its shape and dtype to be filled."""
        check_rank(root, "root", self.size)
        if self.rank == root or x is not None:
            check_tensor(x)
        if x is not None and self.rank != root:
            check_in_place(x)

        def work(tag: int) -> torch.Tensor:
            tree = self._broadcasting(binomial, root)
            header = header_of(x) if self.rank == root and x is not None else torch.empty(HEADER, dtype=torch.int64)
            self._run(tree, header, "sum", tag)
            out = x.detach() if x is not None and describes(header, x) else announced(header)
            flat = plain(out if self._transport.can_carry(out) else out.cpu()).view(-1)
            self._run(
                tree if flat.nbytes <= BCAST_TREE or self.size == 2 else self._broadcasting(scatter_gather, root),
                flat.view(torch.uint8),
                "sum",
                tag,
            )
            if self.rank != root and flat.data_ptr() != out.data_ptr():
                out.copy_(flat.view(out.shape))
            if x is None:
                return out
            if not describes(header, x):  # only now: the others were waiting for this rank's part
                raise ValueError(f"bcast: rank {self.rank} offered {text_of(x)} to fill, but root {root} sent {text_of(out)}")
            return x

        return self._start(f"bcast(root {root})", work, [] if x is None else [x]).wait()

    def gather(self, x: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        """The tensors of all ranks as a list at `root`, None elsewhere. Shapes may differ."""
        check_rank(root, "root", self.size)
        check_tensor(x)
        others = self._others()

        def work(tag: int) -> list[torch.Tensor] | None:
            if self.rank != root:
                self._swap({root: x}, [], tag)
                return None
            return self._in_order(x, self._swap({}, others, tag))

        return self._start(f"gather(root {root})", work, [x]).wait()

    def allgather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks as a list, on all ranks. Shapes may differ."""
        check_tensor(x)
        others = self._others()
        return self._start(
            "allgather()", lambda tag: self._in_order(x, self._swap(dict.fromkeys(others, x), others, tag)), [x]
        ).wait()

    def scatter(self, xs: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        """Rank i gets xs[i] of `root`. Others pass None. Shapes may differ."""
        check_rank(root, "root", self.size)
        if self.rank == root:
            check_list(xs, "scatter", "the root passes", self.size)
        elif xs is not None:
            raise ValueError(f"scatter: rank {self.rank} passes None, because root is {root}")

        def work(tag: int) -> torch.Tensor:
            if xs is None:
                return self._swap({}, [root], tag)[root]
            self._swap({i: xs[i] for i in self._others()}, [], tag)
            return xs[root].detach().clone()

        return self._start(f"scatter(root {root})", work, xs or []).wait()

    def alltoall(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank i sends xs[j] to rank j and gets a list whose element j came from rank j. Shapes may differ."""
        check_list(xs, "alltoall", "every rank passes", self.size)
        others = self._others()
        return self._start(
            "alltoall()", lambda tag: self._in_order(xs[self.rank], self._swap({i: xs[i] for i in others}, others, tag)), xs
        ).wait()

    def send(self, x: torch.Tensor, dest: int, tag: int = 0) -> None:
        """Send `x`; returns when `dest` has begun to receive it. Messages of one pair and tag arrive in order."""
        check_tensor(x)
        check_peer(dest, "dest", self.size, self.rank)
        work = lambda wire_tag: self._swap({dest: x}, [], wire_tag)  # noqa: E731
        self._start(f"send(to {dest}, tag {tag})", work, [x], pair=(self.rank, dest, tag)).wait()

    def recv(self, source: int, tag: int = 0) -> torch.Tensor:
        """The next tensor from `source`, with the shape and dtype it had there."""
        check_peer(source, "source", self.size, self.rank)
        work = lambda wire_tag: self._swap({}, [source], wire_tag)[source]  # noqa: E731
        return self._start(f"recv(from {source}, tag {tag})", work, pair=(source, self.rank, tag)).wait()

    def exchange_async(
        self, x: torch.Tensor, dest: int, out: torch.Tensor, source: int, tag: int = 0, *, may_fail: bool = False
    ) -> Pending:
        """Start to send `x` to `dest` and to fill `out` from `source`; leave both alone until `wait()`, which returns `out`.

        For neighbours that know each other's sizes: contiguous tensors, no header, the receive posted first; an empty tensor is
        not sent. A slow neighbour holds nothing else up: what is called later does not wait for the exchange, only `wait()` does.
        With `may_fail` a neighbour that has died breaks this exchange and nothing else: `settle(seconds)` instead of `wait()`.
        """
        for tensor in (x, out):
            check_tensor(tensor)
            if not is_plain(tensor) or not self._transport.can_carry(tensor):
                raise ValueError(
                    f"exchange_async: contiguous tensors on a device of the backend are wanted, got {text_of(tensor)} on "
                    f"{tensor.device}"
                )
        if x.device != out.device:
            raise ValueError(f"exchange_async: one tensor is on {x.device}, the other on {out.device}")
        check_peer(dest, "dest", self.size, self.rank)
        check_peer(source, "source", self.size, self.rank)
        outgoing, incoming = Message(self._ranks[dest], x.detach().view(-1)), Message(self._ranks[source], out.detach().view(-1))
        posted: list[Any] = []

        def work(_: int) -> torch.Tensor:
            if x.is_cuda:  # NCCL matches by order instead of tags, wants both in one call, and its wait does not block
                self._transport.wait(self._transport.post([outgoing], [incoming], 0))
            else:
                # the size is in the tag: a message never meets a receive that is too small for it
                receive_tag = _tag(self._name, "exchange", source, self.rank, tag, out.nbytes)
                posted.append(self._transport.post([], [incoming], receive_tag))
                send_tag = _tag(self._name, "exchange", self.rank, dest, tag, x.nbytes)
                posted.append(self._transport.post([outgoing], [], send_tag))
            return out

        def land() -> None:
            for messages in posted:
                self._transport.wait(messages, for_ever=may_fail)

        # one name on all ranks, without peers: by it the watch knows that they wait in the same operation
        return self._start(f"exchange(tag {tag})", work, [x, out], pair=(source, dest, tag), landing=land, may_fail=may_fail)

    def _swap(self, outgoing: dict[int, torch.Tensor], incoming: Sequence[int], tag: int) -> dict[int, torch.Tensor]:
        """Send each peer its tensor and receive one from each of `incoming`: first the headers, then what they announce.

        Peers are taken by distance, the same on both ends of a message, a window of them at a time: no rank waits for one that
        waits for it, and a thousand ranks do not all write to rank 0 first.
        """
        received: dict[int, torch.Tensor] = {}
        for first in range(1, self.size, WINDOW):
            distances = range(first, min(first + WINDOW, self.size))
            to = [peer for k in distances if (peer := (self.rank + k) % self.size) in outgoing]
            source = [peer for k in distances if (peer := (self.rank - k) % self.size) in incoming]
            headers = {peer: torch.empty(HEADER, dtype=torch.int64) for peer in source}
            self._exchange({peer: header_of(outgoing[peer]) for peer in to}, headers, tag)
            landing = {peer: announced(header) for peer, header in headers.items()}
            self._exchange({peer: plain(outgoing[peer].detach()).view(-1) for peer in to}, landing, tag)
            received |= landing
        return received

    def _exchange(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], tag: int) -> None:
        via_host = {peer: x for peer, x in receives.items() if not self._transport.can_carry(x)}
        hosted = {peer: x.cpu() for peer, x in via_host.items()}
        posted = self._transport.post(
            [Message(self._ranks[peer], x if self._transport.can_carry(x) else x.cpu()) for peer, x in sends.items()],
            [Message(self._ranks[peer], hosted.get(peer, x).view(-1)) for peer, x in receives.items()],
            tag,
        )
        self._transport.wait(posted)
        for peer, x in via_host.items():
            x.copy_(hosted[peer])
        self._issuer.got_on()

    def _in_order(self, mine: torch.Tensor, received: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [mine.detach().clone() if rank == self.rank else received[rank] for rank in range(self.size)]

    # ---- plain objects -------------------------------------------------------------------------------------------------------

    def bcast_obj(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, on all ranks."""
        check_rank(root, "root", self.size)
        return unpack(self.bcast(pack(obj) if self.rank == root else None, root))

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks as a list at `root`, None elsewhere."""
        packed = self.gather(pack(obj), root)
        return None if packed is None else [unpack(x) for x in packed]

    def allgather_obj(self, obj: Any) -> list[Any]:
        """The objects of all ranks as a list, on all ranks."""
        return [unpack(x) for x in self.allgather(pack(obj))]

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Rank i gets objs[i] of `root`."""
        check_rank(root, "root", self.size)
        if self.rank == root and (objs is None or len(objs) != self.size):
            raise ValueError(f"scatter_obj: the root passes a list of {self.size} objects, one per rank")
        return unpack(self.scatter([pack(obj) for obj in objs] if self.rank == root and objs is not None else None, root))

    def allreduce_obj(self, obj: Any, op: ReduceOp = "sum") -> Any:
        """Python's `+` (or max, min, mean) over the objects in rank order, on all ranks."""
        check_op(op)
        objs = self.allgather_obj(obj)
        if op in ("max", "min"):
            return max(objs) if op == "max" else min(objs)
        total = objs[0]
        for other in objs[1:]:
            total = total + other
        return total / self.size if op == "mean" else total

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.send(pack(obj), dest, tag)

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        return unpack(self.recv(source, tag))

    # ---- groups and life -----------------------------------------------------------------------------------------------------

    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks with the same `color`, ordered by `key`, then by rank; it keeps this one's options."""
        if not isinstance(color, int) or not isinstance(key, int):
            raise TypeError(f"split wants ints, got color {color!r} and key {key!r}")
        table = self.allgather_obj((color, key))
        self._splits += 1
        members = {
            other: sorted((rank for rank in range(self.size) if table[rank][0] == other), key=lambda rank: (table[rank][1], rank))
            for other in sorted({other for other, _ in table})
        }
        ranks = {other: [self._ranks[rank] for rank in own] for other, own in members.items()}
        keys = {other: [self._keys[rank] for rank in own] for other, own in members.items()}
        algorithm = self._algorithm if len(members) == 1 else None  # a schedule is for one world size
        if self._parent is None and self._transport.library:
            # NCCL's groups are made by all ranks of the world together, so only here; deeper splits run as Moves
            for other in members:
                prepare(self._transport, ranks[other], algorithm or for_world(Hosts.of(keys[other]), library=True))
        return Communicator(
            f"{self._name}.{self._splits}.{color}",
            ranks[color],
            members[color].index(self.rank),
            self._transport,
            self._issuer,
            self._watch,
            keys[color],
            algorithm,
            parent=self,
            share=self._share,
        )

    def survivors(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, made without a message: all of them call it with the same ones, the others are lost.

        It has no shared memory, to make which the ranks would have to meet.
        """
        kept = sorted(set(ranks))
        if self.rank not in kept or any(rank not in range(self.size) for rank in kept):
            raise ValueError(f"survivors({list(ranks)}): ranks of this communicator of {self.size}, {self.rank} among them")
        below = self._transport.below if isinstance(self._transport, SharedTransport) else self._transport
        return Communicator(
            f"{self._name}.{'-'.join(map(str, kept))}",
            [self._ranks[rank] for rank in kept],
            kept.index(self.rank),
            below,
            self._issuer,
            self._watch,
            [self._keys[rank] for rank in kept],
            None,
            parent=self,
        )

    def close(self) -> None:
        """End the communicator; what was queued is finished first. A split one leaves its parent open. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._parent is not None and self._team is not None:
            self._team.close()
        if self._parent is None:
            self._issuer.stop()
            if self._watch is not None:
                release(self._watch)
                self._watch.stop()
            self._transport.close()

    def _is_closed(self) -> bool:
        return self._closed or (self._parent is not None and self._parent._is_closed())

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # after an exception the sockets stay open until the exit hook has told the others the reason
        if kind is None:
            self.close()

    # ---- one operation -------------------------------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        work: Callable[[int], Any],
        tensors: Sequence[torch.Tensor] = (),
        pair: tuple[int, int, int] | None = None,
        landing: Callable[[], None] | None = None,
        *,
        may_fail: bool = False,
    ) -> Pending:
        """Number the operation and queue it. A `pair` (source, dest, tag) has an order of its own and no number.

        With `landing`, `work` only begins it; `landing` waits for its end, in a thread of its own.
        """
        if self._is_closed():
            raise RuntimeError(f"{name}: this communicator is closed")
        if pair is None:
            self._number += 1
        number = 0 if pair else self._number
        members = {rank: self._ranks[rank] for rank in sorted({self.rank, *pair[:2]})} if pair else self._members()
        tag = _tag(self._name, number, pair or name)
        check = self._debug and pair is None and self.size > 1
        # a mode is of a thread; the issuing thread takes the caller's, or it could not write to tensors made under it
        inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors)

        def checked() -> Any:
            with torch.inference_mode(inference):
                if check:
                    self._agree(name, number)
                return self._on_team(lambda: work(tag)) if self._team is not None else work(tag)

        def land() -> None:
            assert landing is not None
            with torch.inference_mode(inference):
                landing()

        then = land if landing else None
        operation = Operation(self._name, number, name, members, checked, Lane(tensors), then, may_fail=may_fail)
        return self._issuer.submit(operation)

    def _on_team(self, work: Callable[[], Any]) -> Any:
        """`work` on shared memory; ranks that called different things are told so, and nothing is broken."""
        try:
            return work()
        except Disagreement as error:
            host = self._hosts.ranks[self._inter_rank]
            operation = str(error).partition(": ")[0]
            raise CommunicationError(str(error), operation=operation, missing=[host[rank] for rank in error.late]) from None

    def _agree(self, name: str, number: int) -> None:
        """Under PHALANX_DEBUG: all ranks tell what they are about to do, and all raise when they differ."""
        others = self._others()
        mine = torch.tensor(list(name.encode()[:DEBUG_TEXT].ljust(DEBUG_TEXT)), dtype=torch.uint8)
        said = {peer: torch.empty_like(mine) for peer in others}
        tag = _tag(self._name, number, "agree")
        for first in range(1, self.size, WINDOW):
            distances = range(first, min(first + WINDOW, self.size))
            to = {(self.rank + k) % self.size: mine for k in distances}
            self._exchange(to, {peer: said[peer] for k in distances for peer in [(self.rank - k) % self.size]}, tag)
        calls: dict[str, list[int]] = {}
        for rank in range(self.size):
            text = name if rank == self.rank else bytes(said[rank].tolist()).decode(errors="replace").rstrip()
            calls.setdefault(text, []).append(rank)
        if len(calls) > 1:
            usual = max(calls.values(), key=len)  # the first of several equally large parties counts as the usual one
            odd = sorted(rank for ranks in calls.values() if ranks is not usual for rank in ranks)
            told = "; ".join(
                f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}" for text, ranks in calls.items()
            )
            raise CommunicationError(f"ranks disagree on operation number {number}: {told}", operation=name, missing=odd)

    def _members(self) -> dict[int, int]:
        """Rank here -> rank in the world."""
        return dict(enumerate(self._ranks))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _broadcasting(self, make: Callable[[int, int], Schedule], root: int) -> Schedule:
        key = (make.__name__, root)
        if key not in self._broadcasts:
            self._broadcasts[key] = make(self.size, root)
        return self._broadcasts[key]


def _is_simple(x: Any, op: str) -> bool:
    """Whether shared memory takes `x` as it is; everything else goes the long way, where it is checked."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_cpu
        and x.layout is torch.strided
        and x.dtype in TYPES
        and x.is_contiguous()
        and (op in ("sum", "max", "min") or (op == "mean" and x.is_floating_point()))
    )


def prepare(transport: Transport, ranks: Sequence[int], schedule: Schedule) -> None:
    """Ready the transport for a communicator of `ranks`; all ranks of the world call it, members or not."""
    for needed in (schedule, _scattering(len(ranks))):
        transport.prepare(needed, ranks)


def _scattering(size: int) -> Schedule:
    """A reduce-scatter by itself: the first half of a ring."""
    call = Collective("reduce_scatter", tuple(range(size)), range(size))
    return Schedule(f"reduce_scatter({size})", size, size, (Step((call,)),) if size > 1 else ())


def _tag(*parts: object) -> int:
    """31 bits, because gloo's tags are signed 32."""
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF

"""Messages and collectives on torch.distributed: gloo on the CPU, NCCL on the GPU.

On gloo a schedule runs as Moves: gloo's reduce_scatter is an all-reduce internally and would send twice the bytes. On NCCL it
runs as Collectives. PHALANX_FORM=moves or collectives overrides the choice, to compare them.

Sends and receives carry a tag. Ranks that disagree on the operation wait for different tags, and get an error that names them.
Without tags gloo would write past a buffer and abort the process from a C++ thread.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx._torch_private import abort_nccl
from phalanx.comm.addresses import own_address
from phalanx.comm.envelope import bytes_of
from phalanx.comm.settings import forced_form
from phalanx.comm.signed import Signer
from phalanx.comm.store import FOR_EVER, clear
from phalanx.comm.streams import current_device
from phalanx.comm.traffic import Traffic, Way
from phalanx.comm.transports import Message
from phalanx.comm.transports.torch.errors import is_timeout, network
from phalanx.schedule import Collective, Schedule

PIECE = 256 << 20  # maximum bytes per message: several engines count in 32 bits, and each piece counts as progress

CUT = (1 << 31) - 1  # the tag of a message that is never sent

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "mean": dist.ReduceOp.AVG}

# dtypes that gloo's own collectives can add; it sends and receives all dtypes
_GLOO_ADDS = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}

# dtypes that NCCL can add; all others are sent as bytes and added here
_NCCL_ADDS = _GLOO_ADDS

# newer versions of torch use other names, and deprecate the old ones
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchTransport:
    """The default process group as a transport, initialised here or by the user."""

    def __init__(
        self,
        store: dist.Store,
        signer: Signer | None,
        *,
        timeout: float,
        give_back: Callable[[], bool] | None = None,
        interface: str | None = None,
    ) -> None:
        """`give_back` returns whether this was the last user of a group that Phalanx initialised, which is then destroyed.

        `interface` is where new groups of gloo listen.
        """
        self.store, self.signer, self._interface = store, signer, interface
        self.met = contextlib.ExitStack()  # cleaned up when all ranks have met
        self._give_back = give_back
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._limit = datetime.timedelta(seconds=2 * timeout + 30)
        self._collectives = forced_form()
        self.compares = self._collectives is not None  # PHALANX_FORM: plain torch.distributed, without shared memory
        self._groups: dict[tuple[int, ...], Any] = {}
        self._cold: list[tuple[int, ...]] = []  # this rank's groups that have not called NCCL yet
        self.traffic = Traffic()
        self.got_on: Callable[[], None] = lambda: None  # called after every message: a long transfer is not a hang
        backends = _backends()
        self._cpu = "gloo" in backends.get("cpu", "")
        self._cuda = "nccl" in backends.get("cuda", "")
        self.library = self._cuda or bool(self._collectives)
        with gloo_listens_on(interface):
            self._cpu_group = None if self._cpu else dist.new_group(backend="gloo")

    @property
    def device(self) -> torch.device | None:
        return torch.device("cuda", torch.cuda.current_device()) if self._cuda else current_device()

    @property
    def address(self) -> str:
        """Where gloo listens: the interface that the user named, or else the one that leads to the store."""
        return own_address(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], host_of(self.store))

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        # receives first: on one gloo pair, posting the send first makes the exchange half-duplex
        incoming = [(dist.irecv, piece, m.peer) for m in receives for piece in pieces(m.tensor)]
        outgoing = [(dist.isend, piece, m.peer) for m in sends for piece in pieces(m.tensor)]
        with network():
            return self._post(incoming + outgoing, tag)

    def _post(self, messages: Sequence[tuple[Any, torch.Tensor, int]], tag: int) -> Any:
        if messages and messages[0][1].is_cuda:  # as bytes, because NCCL does not support all dtypes
            posted = [dist.P2POp(kind, bytes_of(x), peer) for kind, x, peer in messages]
            return [(work, None) for work in dist.batch_isend_irecv(posted)]
        return [
            (
                kind(x, peer, group=self._cpu_group, tag=tag),
                self.traffic.post(Way.SEND if kind is dist.isend else Way.RECEIVE, peer, tag),
            )
            for kind, x, peer in messages
        ]

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        limit = FOR_EVER if for_ever else self._limit
        with network():
            for message, ticket in posted:
                if ticket is None:
                    message.wait()  # NCCL: orders the stream. With a timeout it would block the host; the watch bounds it instead
                    continue
                self.traffic.wait(ticket)
                message.wait(limit)
                self.traffic.arrived()
                self.got_on()

    def prepare(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        if not (self._collectives or (self._collectives is None and self._cuda)):
            return
        groups = {tuple(ranks[r] for r in op.group) for op in schedule.ops() if isinstance(op, Collective)}
        for group in sorted(groups - self._groups.keys()):  # one order on all ranks
            self._groups[group] = self._new_group(group)
            if self._cuda and self.rank in group:
                self._cold.append(group)

    def _new_group(self, group: tuple[int, ...]) -> Any:
        if group == tuple(range(self.size)):
            return dist.group.WORLD
        options: Any = {} if list(group) == sorted(group) else {"sort_ranks": False}
        if self._cuda and not self._collectives:
            options["backend"] = "nccl"  # without gloo, whose groups connect every pair of ranks
        with gloo_listens_on(self._interface):
            return dist.new_group(list(group), **options)

    @property
    def cold(self) -> bool:
        return bool(self._cold)

    def warm_up(self, x: torch.Tensor) -> None:
        with network():
            for group in self._cold:
                dist.all_reduce(x, group=self._groups[group])
        self._cold.clear()

    def calls(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        wanted = (x.is_cuda and self._cuda) if self._collectives is None else self._collectives
        if x.dtype not in (_GLOO_ADDS if x.is_cpu else _NCCL_ADDS):
            return False
        return wanted and tuple(ranks[r] for r in call.group) in self._groups

    def collective(self, call: Collective, x: torch.Tensor, op: str, ranks: Sequence[int]) -> None:
        members = tuple(ranks[r] for r in call.group)
        group = self._groups[members]
        part = x.numel() // len(members)
        mine = x[members.index(self.rank) * part :][:part]
        with network():
            self._call(call, x, mine, op, group, members[0])

    def _call(self, call: Collective, x: torch.Tensor, mine: torch.Tensor, op: str, group: Any, first: int) -> None:
        if call.kind == "all_reduce":
            dist.all_reduce(x, _OPS[op], group=group)
        elif call.kind == "reduce_scatter":
            if x.is_cuda:
                _reduce_scatter(mine, x, _OPS[op], group=group)  # in place, which NCCL allows if `mine` is at its own part
            else:
                mine.copy_(_reduced_part(torch.empty_like(mine), x, _OPS[op], group))
        elif call.kind == "all_gather":
            _all_gather(x, mine if x.is_cuda else mine.clone(), group=group)
        elif call.kind == "reduce":
            dist.reduce(x, first, _OPS[op], group=group)
        else:
            dist.broadcast(x, first, group=group)

    def can_carry(self, x: torch.Tensor) -> bool:
        return not x.is_cuda or self._cuda

    def cut(self) -> None:
        """Break the connections after a failure, so that a thread in `wait` returns with an error.

        torch has no call for that with gloo, but it closes all connections of a group in which one wait times out.
        """
        if self._cuda:  # ends kernels that wait for a dead rank, and so whatever the host waits for
            abort_nccl([dist.group.WORLD, *self._groups.values()])
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    work = dist.irecv(torch.empty(1), peer, group=self._cpu_group, tag=CUT)
                    assert work is not None  # torch returns None only to ranks outside the group
                    work.wait(datetime.timedelta(milliseconds=1))
                except (RuntimeError, ValueError) as error:
                    if is_timeout(error):
                        return  # otherwise this peer's connection was already broken: try the next

    def close(self) -> None:
        own = [*self._groups.values(), *([self._cpu_group] if self._cpu_group is not None else [])]
        self._groups, self._cpu_group = {}, None
        give_back, self._give_back = self._give_back, None
        last = give_back is not None and give_back()
        if not dist.is_initialized():
            return
        if last:
            if self.rank == 0:  # all ranks met long ago
                with contextlib.suppress(RuntimeError):  # an elastic job's store may be gone
                    clear(self.store)
            dist.destroy_process_group()
            return
        for group in own:
            if group is not dist.group.WORLD and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


@contextlib.contextmanager
def gloo_listens_on(interface: str | None) -> Iterator[None]:
    """Make gloo groups created in this block listen there, unless you set one. A host's name often resolves to 127.0.1.1."""
    if interface is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def host_of(store: Any) -> str | None:
    """Return the host of a store, as its clients name it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def _reduced_part(out: torch.Tensor, x: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    _reduce_scatter(out, x, op, group=group)
    return out


def pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor into messages of at most PIECE bytes."""
    if x.numel() == 0:
        return ()
    return (x,) if x.nbytes <= PIECE else x.view(-1).split(PIECE // x.element_size())


def _backends() -> dict[str, str]:
    """Return the engine by device type of the default group: {'cpu': 'gloo', 'cuda': 'nccl'}."""
    found = {}
    for pair in dist.get_backend_config().split(","):
        device, _, engine = pair.rpartition(":")
        found[device or "cpu"] = engine
    return found

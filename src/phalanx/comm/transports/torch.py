"""torch.distributed as a transport: gloo on the CPU, NCCL on the GPU. The only file that names its collective functions.

On gloo a schedule runs as Moves: gloo's reduce_scatter is an all-reduce inside and would move twice the bytes. On NCCL it runs
as Collectives. Sends and receives carry a tag, so that ranks which disagree on the operation wait, and can be told why, instead
of writing past a buffer (gloo aborts the process from a C++ thread then). PHALANX_FORM=moves or collectives overrides the choice,
to compare them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.addresses import interface_towards, is_loopback, own_address
from phalanx.comm.failure import FOR_EVER, CommunicationError, clear
from phalanx.comm.launch import Launch, meeting_point_through_mpi4py
from phalanx.comm.rendezvous import meet, share_secret
from phalanx.comm.settings import forced_form
from phalanx.comm.signed import Signer
from phalanx.comm.traffic import Traffic
from phalanx.comm.transports import Message
from phalanx.schedule import Collective, Schedule

PIECE = 256 << 20  # bytes per message at most: several engines count in 32 bits, and each piece is a sign of life

CUT = (1 << 31) - 1  # the tag of a message that never comes

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# what gloo's own collectives add up; it sends and receives everything
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

# newer versions of torch have other names, and deprecate the old ones
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def already_initialized() -> bool:
    """Whether somebody called init_process_group in this process."""
    return dist.is_available() and dist.is_initialized()


_lent = 0  # transports that use a default group which Phalanx initialised; the last one to close destroys it
_signer: Signer | None = None  # of that group's job


class TorchTransport:
    """The default process group as a transport, initialised here or by the user."""

    def __init__(self, store: dist.Store, signer: Signer | None, *, timeout: float) -> None:
        self.store, self.signer = store, signer
        self.met = contextlib.ExitStack()  # what is put away when all ranks have met
        self._borrows = _lent > 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._limit = datetime.timedelta(seconds=2 * timeout + 30)
        self._collectives = forced_form()
        self.compares = self._collectives is not None  # PHALANX_FORM: torch.distributed as it is, no shared memory beside it
        self._groups: dict[tuple[int, ...], Any] = {}
        self.traffic = Traffic()
        self.got_on: Callable[[], None] = lambda: None  # called after every message: a long transfer that moves is not a hang
        backends = _backends()
        self._cpu = "gloo" in backends.get("cpu", "")
        self._cuda = "nccl" in backends.get("cuda", "")
        self.library = self._cuda or bool(self._collectives)
        self._cpu_group = None if self._cpu else dist.new_group(backend="gloo")

    @property
    def address(self) -> str:
        """Where gloo listens: on the interface that the user named, else on the one that leads to the store."""
        named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        store: Any = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        host = store.host if isinstance(store, dist.TCPStore) else None
        return own_address(named, host)

    @staticmethod
    def join(launch: Launch, backend: str | None, timeout: float) -> TorchTransport:
        """Meet the other ranks and initialise torch.distributed."""
        if launch.address is None and launch.local_world < launch.world:
            address, port = meeting_point_through_mpi4py()
            launch = replace(launch, address=address, port=port)
        store, signer = meet(launch, timeout)
        if backend is None:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        restore = _point_gloo_at(launch)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=launch.rank,
                world_size=launch.world,
                timeout=datetime.timedelta(seconds=timeout),
            )
            # so much for the start; from now on the watch ends a hopeless wait, and the engine's own limit is the last resort
            _set_timeout(datetime.timedelta(seconds=2 * timeout + 30))
        except RuntimeError as error:
            raise CommunicationError(
                f"create_communicator on rank {launch.rank}: all {launch.world} ranks have come, but torch.distributed does not "
                f"start: {str(error).splitlines()[0]} (if they cannot connect: GLOO_SOCKET_IFNAME names the interface to use)",
                operation="create_communicator",
            ) from error
        finally:
            restore()
        global _lent, _signer
        _lent, _signer = 1, signer
        return TorchTransport(store, signer, timeout=timeout)

    @staticmethod
    def adopt(timeout: float) -> TorchTransport:
        """Use what the user, or an earlier communicator, initialised."""
        global _lent
        store = dist.distributed_c10d._get_default_store()
        if _lent > 0:
            _lent += 1
            return TorchTransport(store, _signer, timeout=timeout)
        met = contextlib.ExitStack()
        made = TorchTransport(store, share_secret(store, dist.get_rank(), dist.get_world_size(), timeout, met), timeout=timeout)
        made.met = met
        return made

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Any:
        # receives first: on one gloo pair a send that is posted first makes the exchange half-duplex
        incoming = [(dist.irecv, piece, m.peer) for m in receives for piece in _pieces(m.tensor)]
        outgoing = [(dist.isend, piece, m.peer) for m in sends for piece in _pieces(m.tensor)]
        messages = incoming + outgoing
        if messages and messages[0][1].is_cuda:
            return [(work, None) for work in dist.batch_isend_irecv([dist.P2POp(kind, x, peer) for kind, x, peer in messages])]
        return [
            (
                kind(x, peer, group=self._cpu_group, tag=tag),
                self.traffic.post("send" if kind is dist.isend else "receive", peer, tag),
            )
            for kind, x, peer in messages
        ]

    def wait(self, posted: Any, *, for_ever: bool = False) -> None:
        for message, ticket in posted:
            if ticket is not None:
                self.traffic.wait(ticket)
            message.wait(FOR_EVER if for_ever else self._limit)  # for NCCL this orders the stream and does not block the host
            self.traffic.arrived()
            self.got_on()

    def prepare(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        if not (self._collectives or (self._collectives is None and self._cuda)):
            return
        groups = {tuple(ranks[r] for r in op.group) for op in schedule.ops() if isinstance(op, Collective)}
        for group in sorted(groups - self._groups.keys()):  # one order on all ranks
            ordered: Any = {} if list(group) == sorted(group) else {"sort_ranks": False}
            made = dist.new_group(list(group), **ordered) if group != tuple(range(self.size)) else dist.group.WORLD
            self._groups[group] = made
            if self._cuda and self.rank in group:  # NCCL builds its rings at the first call: now rather than in the first step
                dist.all_reduce(torch.zeros(1, device="cuda"), group=made)

    def calls(self, call: Collective, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        wanted = (x.is_cuda and self._cuda) if self._collectives is None else self._collectives
        if x.is_cpu and x.dtype not in _GLOO_ADDS:
            return False
        return wanted and tuple(ranks[r] for r in call.group) in self._groups

    def collective(self, call: Collective, x: torch.Tensor, op: str, ranks: Sequence[int]) -> None:
        members = tuple(ranks[r] for r in call.group)
        group = self._groups[members]
        part = x.numel() // len(members)
        mine = x[members.index(self.rank) * part :][:part]
        if call.kind == "all_reduce":
            dist.all_reduce(x, _OPS[op], group=group)
        elif call.kind == "reduce_scatter":
            if x.is_cuda:
                _reduce_scatter(mine, x, _OPS[op], group=group)  # in place, as NCCL allows when `mine` lies at its own part
            else:
                mine.copy_(_reduced_part(torch.empty_like(mine), x, _OPS[op], group))
        elif call.kind == "all_gather":
            _all_gather(x, mine if x.is_cuda else mine.clone(), group=group)
        elif call.kind == "reduce":
            dist.reduce(x, members[0], _OPS[op], group=group)
        else:
            dist.broadcast(x, members[0], group=group)

    def can_carry(self, x: torch.Tensor) -> bool:
        return not x.is_cuda or self._cuda

    def cut(self) -> None:
        """After a failure: break the connections, so that a thread which waits in `wait` returns with an error.

        torch has no call for it, but gloo closes all connections of a group in which one wait runs out of time.
        """
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    work = dist.irecv(torch.empty(1), peer, group=self._cpu_group, tag=CUT)
                    assert work is not None  # torch returns None only to ranks outside the group
                    work.wait(datetime.timedelta(milliseconds=1))
                except (RuntimeError, ValueError) as error:
                    if "Timed out" in str(error):
                        return  # otherwise this peer's connection was broken already: try the next

    def close(self) -> None:
        global _lent
        own = [*self._groups.values(), *([self._cpu_group] if self._cpu_group is not None else [])]
        self._groups, self._cpu_group = {}, None
        last = self._borrows and _lent == 1
        if self._borrows:
            self._borrows = False
            _lent -= 1
        if not dist.is_initialized():
            return
        if last:
            if self.rank == 0:  # all have met long ago
                with contextlib.suppress(RuntimeError):  # an elastic job's store may be gone
                    clear(self.store)
            dist.destroy_process_group()
            return
        for group in own:
            if group is not dist.group.WORLD and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _reduced_part(out: torch.Tensor, x: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    _reduce_scatter(out, x, op, group=group)
    return out


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    if x.numel() == 0:
        return ()
    return (x,) if x.nbytes <= PIECE else x.view(-1).split(PIECE // x.element_size())


def _backends() -> dict[str, str]:
    """Engine by device type of the default group: {'cpu': 'gloo', 'cuda': 'nccl'}."""
    found = {}
    for pair in dist.get_backend_config().split(","):
        device, _, engine = pair.rpartition(":")
        found[device or "cpu"] = engine
    return found


# ---- the interface -----------------------------------------------------------------------------------------------------------


def _point_gloo_at(launch: Launch) -> Any:
    """Let gloo listen on the interface that leads to rank 0; host names often resolve to a useless address (127.0.1.1)."""
    if "GLOO_SOCKET_IFNAME" in os.environ or launch.world == 1:
        return lambda: None
    one_host = launch.one_host or launch.address is None or is_loopback(launch.address)
    name = interface_towards("127.0.0.1" if one_host else str(launch.address), launch.port or 9)
    if name is None:
        return lambda: None
    os.environ["GLOO_SOCKET_IFNAME"] = name
    return lambda: os.environ.pop("GLOO_SOCKET_IFNAME", None)

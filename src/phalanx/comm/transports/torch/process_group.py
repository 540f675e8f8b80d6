"""The default process group of torch.distributed: initialised here, by an earlier communicator, or by the user."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from phalanx._torch_private import default_store, set_timeout
from phalanx.comm.addresses import interface_towards, is_loopback
from phalanx.comm.failure import CommunicationError
from phalanx.comm.launch import Launch, meeting_point_through_mpi4py
from phalanx.comm.rendezvous import meet, share_secret
from phalanx.comm.signed import Signer
from phalanx.comm.transports.torch.transport import TorchTransport

_users = 0  # transports on a default group that Phalanx initialised; the last one to close destroys it
_signer: Signer | None = None  # of that group's job


def already_initialized() -> bool:
    """Whether init_process_group was called in this process."""
    return dist.is_available() and dist.is_initialized()


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
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world, timeout=limit)
        # that was for the start; from now on the watch ends a hopeless wait, and the engine's own limit is the last resort
        set_timeout(datetime.timedelta(seconds=2 * timeout + 30))
    except RuntimeError as error:
        raise CommunicationError(
            f"create_communicator on rank {launch.rank}: all {launch.world} ranks have come, but torch.distributed does not "
            f"start: {str(error).splitlines()[0]} (if they cannot connect: GLOO_SOCKET_IFNAME names the interface to use)",
            operation="create_communicator",
        ) from error
    finally:
        restore()
    global _users, _signer
    _users, _signer = 1, signer
    return TorchTransport(store, signer, timeout=timeout, give_back=_give_back)


def adopt(timeout: float) -> TorchTransport:
    """Use the group that the user, or an earlier communicator, initialised."""
    global _users
    store = default_store()
    if _users > 0:
        _users += 1
        return TorchTransport(store, _signer, timeout=timeout, give_back=_give_back)
    met = contextlib.ExitStack()
    signer = share_secret(store, dist.get_rank(), dist.get_world_size(), timeout, met)
    made = TorchTransport(store, signer, timeout=timeout)
    made.met = met
    return made


def _give_back() -> bool:
    """One user less; whether it was the last."""
    global _users
    _users -= 1
    return _users == 0


def _point_gloo_at(launch: Launch) -> Callable[[], object]:
    """Make gloo listen on the interface that leads to rank 0; host names often resolve to a useless address (127.0.1.1)."""
    if "GLOO_SOCKET_IFNAME" in os.environ or launch.world == 1:
        return lambda: None
    one_host = launch.one_host or launch.address is None or is_loopback(launch.address)
    name = interface_towards("127.0.0.1" if one_host else str(launch.address), launch.port or 9)
    if name is None:
        return lambda: None
    os.environ["GLOO_SOCKET_IFNAME"] = name
    return lambda: os.environ.pop("GLOO_SOCKET_IFNAME", None)

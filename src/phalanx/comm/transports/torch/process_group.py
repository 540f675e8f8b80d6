"""The default process group of torch.distributed: initialised here, by an earlier communicator, or by the user."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx._torch_private import default_store, set_timeout
from phalanx.comm.addresses import interface_towards, is_loopback
from phalanx.comm.failure import CommunicationError
from phalanx.comm.hosts import host_key
from phalanx.comm.launch import Launch, check_own_devices, device_index, meeting_point_through_mpi4py, place_among
from phalanx.comm.rendezvous import meet, share_secret
from phalanx.comm.signed import Signer
from phalanx.comm.transports.torch.transport import TorchTransport, gloo_listens_on, host_of

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
    nccl = "nccl" in backend
    device = take_device(launch, store, nccl=nccl) if torch.cuda.is_available() else None
    interface = _interface_of(launch)
    try:
        limit = datetime.timedelta(seconds=timeout)
        bound: Any = {"device_id": device} if nccl else {}  # otherwise NCCL guesses the device in its first call
        with gloo_listens_on(interface):
            dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world, timeout=limit, **bound)
        # that was for the start; from now on the watch ends waits that cannot succeed; the engine's timeout is the last resort
        set_timeout(datetime.timedelta(seconds=2 * timeout + 30))
    except RuntimeError as error:
        raise CommunicationError(
            f"create_communicator on rank {launch.rank}: all {launch.world} ranks are there, but torch.distributed does not "
            f"start: {str(error).splitlines()[0]} (if they cannot connect: GLOO_SOCKET_IFNAME names the interface to use)",
            operation="create_communicator",
        ) from error
    global _users, _signer
    _users, _signer = 1, signer
    return TorchTransport(store, signer, timeout=timeout, give_back=_give_back, interface=interface)


def adopt(timeout: float) -> TorchTransport:
    """Use the group that the user, or an earlier communicator, initialised."""
    global _users
    store = default_store()
    if _users > 0:
        _users += 1
        return TorchTransport(store, _signer, timeout=timeout, give_back=_give_back)
    met = contextlib.ExitStack()
    signer = share_secret(store, dist.get_rank(), dist.get_world_size(), timeout, met)
    made = TorchTransport(store, signer, timeout=timeout, interface=_interface_to(store))
    made.met = met
    return made


def _give_back() -> bool:
    """Count one user less. Return whether it was the last."""
    global _users
    _users -= 1
    return _users == 0


def take_device(launch: Launch, store: dist.Store, *, nccl: bool) -> torch.device:
    """Make one GPU of this host the current device of this process, a different one for each rank if NCCL is to use it."""
    if not launch.placed:  # RANK and WORLD_SIZE were set by hand
        store.set(f"phalanx/place/{launch.rank}", host_key())
        keys = store.multi_get([f"phalanx/place/{r}" for r in range(launch.world)])
        launch = place_among(launch, [key.decode() for key in keys])
    count, rank = torch.cuda.device_count(), launch.local_rank
    device = torch.device("cuda", device_index(rank, launch.local_world, count) if nccl else rank % count)
    torch.cuda.set_device(device)
    if nccl:
        store.set(f"phalanx/gpu/{launch.rank}", str(torch.cuda.get_device_properties(device).uuid))
        check_own_devices([key.decode() for key in store.multi_get([f"phalanx/gpu/{r}" for r in range(launch.world)])])
    return device


def _interface_of(launch: Launch) -> str | None:
    """Return the network interface that leads to rank 0."""
    one_host = launch.one_host or launch.address is None or is_loopback(launch.address)
    return interface_towards("127.0.0.1" if one_host else str(launch.address), launch.port or 9)


def _interface_to(store: Any) -> str | None:
    """Return the interface that leads to the store of a process group that the user initialised."""
    host = host_of(store)
    return None if host is None else interface_towards("127.0.0.1" if is_loopback(host) else host, 9)

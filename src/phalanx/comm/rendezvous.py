"""The ranks of a job meet at the store of rank 0 (or of torchrun's agent), all within `timeout`.

    rank 0                                 store                          rank r
    opens the port, or raises
    claims rank 0, describes the job --->  job  ------------------------> probes: is it a store? is this my job?
                                           rank/r <---------------------- claims its rank, or raises if it is taken
                                           here/r <---------------------- is here
    all are here ----------------------->  met  ------------------------> all are here

A second job at the port of a running one raises before it touches anything that the running job reads: its rank 0 cannot open the
port, and its other ranks find their ranks claimed. A program that is not a store, such as a web server, is detected too.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
import socket
import struct
import time
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.addresses import is_loopback, listen
from phalanx.comm.bounded import bounded
from phalanx.comm.failure import CommunicationError
from phalanx.comm.launch import LISTENER, Launch, LaunchError, discover
from phalanx.comm.meeting import WrongJobError, claim, find_job, keys_of, open_job, wait_for_all
from phalanx.comm.notes import Note
from phalanx.comm.signed import Signer
from phalanx.comm.store import Store, clear
from phalanx.comm.verdict import name_ranks

LOOK = 0.05  # seconds between two polls
MARGIN = 0.3  # seconds after its own deadline until a wait inside torch is abandoned

# One base store per process and job. It outlives its communicators: the next one must not meet at a port that is being closed.
# Meetings are numbered, so that none sees the keys of another.
_base_stores: dict[Launch, dist.Store] = {}
_meetings = itertools.count()
_adoptions = itertools.count()


def meet(launch: Launch, timeout: float) -> tuple[dist.Store, Signer | None]:
    """Return the job's store and the signer of its keys once every rank is there. Errors name the missing ranks or the port."""
    deadline = time.monotonic() + timeout
    where = f"{launch.address}:{launch.port}" if launch.address else "its host"

    def failed(words: str, missing: list[int], cause: BaseException | None = None) -> CommunicationError:
        error = CommunicationError(
            f"create_communicator on rank {launch.rank}: {words}", operation="create_communicator", missing=missing
        )
        error.__cause__ = cause
        return error

    def gather() -> tuple[dist.Store, Signer | None, list[int]]:
        with contextlib.ExitStack() as until_met:
            if launch not in _base_stores:
                _base_stores[launch] = _open_store(launch, deadline, until_met)
            base = _base_stores[launch]
            number = next(_meetings)
            prefix = f"phalanx/{launch.attempt}/{number}"  # an elastic job's earlier attempts used the same store
            if launch.rank == 0:
                meeting = open_job(base, prefix, launch, deadline, until_met)
            else:
                meeting = find_job(base, prefix, launch, deadline)
            claim(meeting.keys, launch.rank, where if launch.address else "this host")
            missing = wait_for_all(meeting, launch, deadline, min(0.5, timeout / 10))
            if launch.rank == 0 and number and not missing:  # all ranks have left the previous meeting
                clear(dist.PrefixStore(f"phalanx/{launch.attempt}/{number - 1}", base))
            return dist.PrefixStore(f"{prefix}/{meeting.token}", base), meeting.signer, missing

    try:
        store, signer, missing = bounded(deadline + MARGIN - time.monotonic(), gather, "phalanx-meeting")
    except (WrongJobError, LaunchError) as error:
        raise failed(str(error), []) from None
    except (RuntimeError, TimeoutError) as error:
        raise failed(
            f"rank 0 does not answer at {where} within {timeout:g} s: did it start, and does that address lead to its host? "
            f"[{str(error).splitlines()[0]}]",
            [0],
            error,
        ) from error
    if missing:
        raise failed(f"{name_ranks(missing)} of {launch.world} did not come within {timeout:g} s", missing)
    return store, signer


def share_secret(store: Any, rank: int, world: int, timeout: float, until_met: contextlib.ExitStack) -> Signer | None:
    """Return the signer for the keys of a process group that the user created. Its ranks have already met."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    tcp = isinstance(store, dist.TCPStore)
    try:
        launch = discover()
        one_host = launch.one_host and launch.world == world
    except LaunchError:  # the environment describes a job other than the user's group
        one_host = False
    mine = Launch(
        how="its own process group",
        rank=rank,
        world=world,
        address=store.host if tcp else "a file",
        port=store.port if tcp else 0,
        one_host=one_host,
    )
    # an elastic job keeps its store when it restarts
    prefix = f"phalanx/own/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_adoptions)}"
    deadline = time.monotonic() + timeout
    if rank == 0:
        meeting = open_job(store, prefix, mine, deadline, until_met)
        meeting.announce()
        until_met.callback(meeting.keys.delete_key, "job")
        return meeting.signer
    try:
        return find_job(store, prefix, mine, deadline).signer
    except RuntimeError as error:
        raise CommunicationError(
            f"create_communicator on rank {rank}: {error}", operation="create_communicator", missing=[0]
        ) from None


# ---- the store -----------------------------------------------------------------------------------------------------------------


def _open_store(launch: Launch, deadline: float, until_met: contextlib.ExitStack) -> dist.Store:
    if launch.address is None and launch.local_world == launch.world:
        return _store_by_note(launch, deadline, until_met)
    assert launch.address is not None  # `join` asks mpi4py if the launcher names no address
    host = _host(launch)
    if launch.rank == 0 and not launch.agent_store:
        listener = _listen(host, launch)
        here = listener.getsockname()[0]  # `host`, if it is a name, may resolve to an address that the socket does not listen on
        return serve(listener, host if here in ("::", "0.0.0.0") else here, launch.world, _left(deadline))
    probe(host, launch.port, deadline)
    return dist.TCPStore(host, launch.port, launch.world, False, _left(deadline), wait_for_workers=False)


def _host(launch: Launch) -> str:
    """Return the meeting point as seen from this host. A job on one host keeps its store off the network."""
    host = launch.address or ""
    if host.lower() == "localhost" or (launch.one_host and not launch.agent_store and not is_loopback(host)):
        return "127.0.0.1"  # one address, so that ::1 is not tried and torch does not warn
    return host


def _left(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(0.1, deadline - time.monotonic()))


def serve(listener: socket.socket, host: str, world: int, limit: datetime.timedelta) -> dist.Store:
    """Serve a store on a listening socket. `listener` is closed here."""
    # the libuv of torch 2.6 refuses such a socket and prints to stderr; 2.7 to 2.12 are untested
    options: list[dict[str, Any]] = [*([{}] if torch.__version__ >= "2.7" else []), {"use_libuv": False}]
    with listener:
        port = listener.getsockname()[1]
        for more in options:
            own = os.dup(listener.fileno())
            try:
                return dist.TCPStore(host, port, world, True, limit, wait_for_workers=False, master_listen_fd=own, **more)
            except RuntimeError:
                with contextlib.suppress(OSError):  # the store may have closed it
                    os.close(own)
                if more is options[-1]:
                    raise
    raise AssertionError("the last attempt returns or raises")


def _listen(host: str, launch: Launch) -> socket.socket:
    """Open the port of the meeting point."""
    if launch.listener >= 0:  # the parent process opened it
        try:
            os.set_inheritable(launch.listener, False)
            return socket.socket(fileno=os.dup(launch.listener))
        except OSError as error:
            raise WrongJobError(f"{LISTENER}={launch.listener} is not an open socket ({error.strerror}): unset it") from None
    try:
        return listen(host, launch.port, max(128, launch.world))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise RuntimeError(f"cannot listen at port {launch.port}: {error.strerror}") from error
        raise WrongJobError(
            f"port {launch.port} on {launch.address} is in use, by another job or another program: choose another MASTER_PORT"
        ) from None


def _store_by_note(launch: Launch, deadline: float, until_met: contextlib.ExitStack) -> dist.Store:
    """Open a store without a meeting point: all ranks are on this host, and rank 0 writes a free loopback port to a note."""
    note = Note()
    if launch.rank == 0:
        # not the wildcard address that TCPStore would use, because no other host needs this store
        listener = listen("127.0.0.1", 0, max(128, launch.world))
        port = listener.getsockname()[1]
        store = serve(listener, "127.0.0.1", launch.world, _left(deadline))
        note.leave(str(port))
        until_met.callback(note.remove)
        return store
    port_text = note.read(deadline)
    if port_text is None:
        raise RuntimeError("no note from rank 0 on this host")
    return dist.TCPStore("127.0.0.1", int(port_text), launch.world, False, _left(deadline), wait_for_workers=False)


def watch_stores(store: Any, prefix: str, timeout: float, signer: Signer | None) -> tuple[Store, Store, bool]:
    """Return two clients of the store under `prefix`, with signed keys, and whether a rank's process holds the store.

    A client serves one thread at a time, and the watch blocks on its own.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    tcp = isinstance(store, dist.TCPStore)
    limit = datetime.timedelta(seconds=timeout)
    if tcp:
        store.set_timeout(limit)  # it was created with the time that the meeting had left
    other = (
        bounded(
            timeout,
            lambda: dist.TCPStore(store.host, store.port, None, False, limit, wait_for_workers=False),
            "phalanx-meeting",
        )
        if tcp
        else store
    )
    held = tcp and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # an elastic job keeps its store when it restarts
    return keys_of(store, prefix, signer, timeout), keys_of(other, prefix, signer, timeout), held


# ---- is it a store? ------------------------------------------------------------------------------------------------------------

_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE  # from the protocol of torch's TCPStore


def probe(address: str, port: int, deadline: float) -> None:
    """Return when a store answers. torch's own client overruns its timeout and prints C++ stacks."""
    refused: OSError | None = None
    while True:
        try:
            if _answers(address, port, deadline):
                return
            refused = None
        except OSError as error:
            refused = error
        if time.monotonic() > deadline - 2 * LOOK:
            break
        time.sleep(LOOK)
    if refused is not None:
        raise RuntimeError(str(refused)) from refused
    if _protocol_is_known():
        raise WrongJobError(
            f"what listens at {address}:{port} is not the store of a job, but another program: choose another MASTER_PORT"
        )


def _answers(address: str, port: int, deadline: float) -> bool:
    """Whether a store answers a ping. Raise OSError if nothing listens."""
    nonce = os.getpid()
    with socket.create_connection((address, port), max(0.1, deadline - time.monotonic())) as connection:
        connection.settimeout(max(0.1, deadline - LOOK - time.monotonic()))
        answer = b""
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, nonce))
            while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
                answer += more
        return answer == struct.pack("=I", nonce)


def _protocol_is_known() -> bool:
    """Whether this torch still uses the protocol that `_answers` assumes. Check this before blaming another program."""
    own: Any = serve(listen("127.0.0.1", 0, 1), "127.0.0.1", 1, datetime.timedelta(seconds=5))
    return _answers("127.0.0.1", own.port, time.monotonic() + 5)

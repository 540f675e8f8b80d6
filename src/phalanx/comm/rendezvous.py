"""How the ranks of a job meet: at the store of rank 0 (or of torchrun's agent), each in a seat of its own, all within `timeout`.

    rank 0                                 store                          rank r
    takes the port, or says who has it
    seat 0, job: its size and a token -->  job  ------------------------> knocks: is it a store? is this my job?
                                           seat r <---------------------- takes its seat, or leaves if somebody sits there
                                           here/r <---------------------- is here
    all are here ----------------------->  met  ------------------------> all are here

A second job at the port of a running one leaves before it has touched anything that the running job reads: rank 0 cannot take the
port, the others find their seats taken. What is not a store (a web server, a program that only listens) is recognised too.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.comm.addresses import is_loopback, listen
from phalanx.comm.failure import CommunicationError, Store, clear
from phalanx.comm.launch import LISTENER, Launch, LaunchError, discover
from phalanx.comm.notes import Note
from phalanx.comm.seats import StrangerError, claim, find_job, keys_of, open_job, wait_for_all
from phalanx.comm.signed import Signer
from phalanx.comm.verdict import name_ranks

T = TypeVar("T")

LOOK = 0.05  # seconds between two looks at what others must do
MARGIN = 0.3  # seconds: how much later than its own deadline a wait inside torch is given up

# One base store per process and job, kept when a communicator is closed: the next one must not meet at a port that is just being
# given up. Meetings are numbered, so that none sees the keys of another.
_base_stores: dict[Launch, dist.Store] = {}
_meetings = itertools.count()
_adoptions = itertools.count()


def meet(launch: Launch, timeout: float) -> tuple[dist.Store, Signer | None]:
    """The job's store, and what signs its keys, when every rank has come; an error names who did not, or whose port it is."""
    deadline = time.monotonic() + timeout
    where = f"{launch.address}:{launch.port}" if launch.address else "its host"

    def failed(words: str, missing: list[int], cause: BaseException | None = None) -> CommunicationError:
        error = CommunicationError(
            f"create_communicator on rank {launch.rank}: {words}", operation="create_communicator", missing=missing
        )
        error.__cause__ = cause
        return error

    def sit_down() -> tuple[dist.Store, Signer | None, list[int]]:
        with contextlib.ExitStack() as until_met:
            if launch not in _base_stores:
                _base_stores[launch] = _open_store(launch, deadline, until_met)
            base = _base_stores[launch]
            # an elastic job's earlier attempts used the same store
            number = next(_meetings)
            prefix = f"phalanx/{launch.attempt}/{number}"
            if launch.rank == 0:
                seat = open_job(base, prefix, launch, deadline, until_met)
            else:
                seat = find_job(base, prefix, launch, deadline)
            claim(seat.keys, launch.rank, where if launch.address else "this host")
            missing = wait_for_all(seat, launch, deadline, min(0.5, timeout / 10))
            if launch.rank == 0 and number and not missing:  # all have left the meeting before this one
                clear(dist.PrefixStore(f"phalanx/{launch.attempt}/{number - 1}", base))
            return dist.PrefixStore(f"{prefix}/{seat.token}", base), seat.signer, missing

    try:
        store, signer, missing = bounded(deadline + MARGIN - time.monotonic(), sit_down)
    except (StrangerError, LaunchError) as error:
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
    """What signs the keys of a process group that the user has made, and whose ranks have met therefore."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    tcp = isinstance(store, dist.TCPStore)
    try:
        launch = discover()
        one_host = launch.one_host and launch.world == world
    except LaunchError:  # it describes another job than the user has made
        one_host = False
    mine = Launch(
        how="its own process group",
        rank=rank,
        world=world,
        address=store.host if tcp else "a file",
        port=store.port if tcp else 0,
        one_host=one_host,
    )
    # an elastic job keeps its store when it starts again
    prefix = f"phalanx/own/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_adoptions)}"
    deadline = time.monotonic() + timeout
    if rank == 0:
        seat = open_job(store, prefix, mine, deadline, until_met)
        seat.speak()
        until_met.callback(seat.keys.delete_key, "job")
        return seat.signer
    try:
        return find_job(store, prefix, mine, deadline).signer
    except RuntimeError as error:
        raise CommunicationError(
            f"create_communicator on rank {rank}: {error}", operation="create_communicator", missing=[0]
        ) from None


def bounded(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, or its error; TimeoutError if it takes longer: torch's stores may wait for ever."""
    result: list[T] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as caught:  # noqa: BLE001  raised in the calling thread
            error.append(caught)

    thread = threading.Thread(target=run, name="phalanx-meeting", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if error:
        raise error[0]
    if not result:
        raise TimeoutError("its store does not answer")
    return result[0]


# ---- the store -----------------------------------------------------------------------------------------------------------------


def _open_store(launch: Launch, deadline: float, until_met: contextlib.ExitStack) -> dist.Store:
    if launch.address is None and launch.local_world == launch.world:
        return _store_by_note(launch, deadline, until_met)
    assert launch.address is not None  # `join` has asked mpi4py where nobody else tells
    host = _host(launch)
    if launch.rank == 0 and not launch.agent_store:
        listener = _listen(host, launch)
        here = listener.getsockname()[0]  # as a name, `host` may lead back here by an address on which nobody listens
        return _serve(listener, host if here in ("::", "0.0.0.0") else here, launch.world, _left(deadline))
    knock(host, launch.port, deadline)
    return dist.TCPStore(host, launch.port, launch.world, False, _left(deadline), wait_for_workers=False)


def _host(launch: Launch) -> str:
    """The meeting point as this host reaches it: nobody else has business with the store of a job on one host."""
    host = launch.address or ""
    if host.lower() == "localhost" or (launch.one_host and not launch.agent_store and not is_loopback(host)):
        return "127.0.0.1"  # one address: no attempt at ::1, nor torch's warning
    return host


def _left(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(0.1, deadline - time.monotonic()))


def _serve(listener: socket.socket, host: str, world: int, limit: datetime.timedelta) -> dist.Store:
    """A store on a socket that listens already."""
    # the libuv of torch 2.6 takes no such socket, and says so on stderr; of 2.7 to 2.12 we do not know
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
    """The port of the meeting point."""
    if launch.listener >= 0:  # whoever started this process has taken it
        try:
            os.set_inheritable(launch.listener, False)
            return socket.socket(fileno=os.dup(launch.listener))
        except OSError as error:
            raise StrangerError(f"{LISTENER}={launch.listener} is not an open socket ({error.strerror}): unset it") from None
    try:
        return listen(host, launch.port, max(128, launch.world))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise RuntimeError(f"cannot listen at port {launch.port}: {error.strerror}") from error
        raise StrangerError(
            f"port {launch.port} on {launch.address} is in use, by another job or another program: choose another MASTER_PORT"
        ) from None


def _store_by_note(launch: Launch, deadline: float, until_met: contextlib.ExitStack) -> dist.Store:
    """All ranks on this host, and no meeting point given: a free loopback port, told by a note."""
    note = Note()
    if launch.rank == 0:
        # not the wildcard address that TCPStore would take: nobody else has business here
        listener = listen("127.0.0.1", 0, max(128, launch.world))
        port = listener.getsockname()[1]
        store = _serve(listener, "127.0.0.1", launch.world, _left(deadline))
        note.leave(str(port))
        until_met.callback(note.remove)
        return store
    port_text = note.read(deadline)
    if port_text is None:
        raise RuntimeError("no note from rank 0 on this host")
    return dist.TCPStore("127.0.0.1", int(port_text), launch.world, False, _left(deadline), wait_for_workers=False)


def watch_stores(store: Any, prefix: str, timeout: float, signer: Signer | None) -> tuple[Store, Store, bool]:
    """The store twice, under `prefix`, with signed keys: one client serves one thread at a time, and a watch sleeps on its own.

    Also whether the store is one that a rank's process holds.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    tcp = isinstance(store, dist.TCPStore)
    limit = datetime.timedelta(seconds=timeout)
    if tcp:
        store.set_timeout(limit)  # of what follows; it was made with what the meeting had left
    other = (
        bounded(timeout, lambda: dist.TCPStore(store.host, store.port, None, False, limit, wait_for_workers=False))
        if tcp
        else store
    )
    held = tcp and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # an elastic job keeps its store when it starts again
    return keys_of(store, prefix, signer, timeout), keys_of(other, prefix, signer, timeout), held


# ---- is it a store? ------------------------------------------------------------------------------------------------------------

_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE  # of the protocol of torch's TCPStore


def knock(address: str, port: int, deadline: float) -> None:
    """Return when a store answers there. torch's client would wait itself, but overruns its timeout and prints C++ stacks."""
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
    if _probe_is_valid():
        raise StrangerError(
            f"what listens at {address}:{port} is not the store of a job, but another program: choose another MASTER_PORT"
        )


def _answers(address: str, port: int, deadline: float) -> bool:
    """Whether a store answers a ping; OSError if nobody listens."""
    nonce = os.getpid()
    with socket.create_connection((address, port), max(0.1, deadline - time.monotonic())) as connection:
        connection.settimeout(max(0.1, deadline - LOOK - time.monotonic()))
        answer = b""
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, nonce))
            while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
                answer += more
        return answer == struct.pack("=I", nonce)


def _probe_is_valid() -> bool:
    """Whether this version of torch still speaks the protocol that `_answers` assumes: asked only before a stranger is blamed."""
    own: Any = _serve(listen("127.0.0.1", 0, 1), "127.0.0.1", 1, datetime.timedelta(seconds=5))
    return _answers("127.0.0.1", own.port, time.monotonic() + 5)

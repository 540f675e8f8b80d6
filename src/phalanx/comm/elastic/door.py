"""Where the agents of a job meet, and which of them holds the meeting point: the one whose host has its address.

All agents start with the same command. Each tries to listen at the meeting point. An agent that cannot, because the address
belongs to another host or another agent has the port, looks for the job there. If a launcher numbers its processes, its first
process holds the meeting point instead.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from phalanx.comm import addresses
from phalanx.comm.bounded import bounded
from phalanx.comm.elastic.board import PREFIX, MeetingPoint
from phalanx.comm.launch import ALONE, DEFAULT_PORT, SECRET, Launch, LaunchError, discover, exported_secret
from phalanx.comm.meeting import WrongJobError
from phalanx.comm.notes import is_token
from phalanx.comm.rendezvous import probe, serve
from phalanx.comm.signed import SIGNATURE, Signer, peek

JOB = f"{PREFIX}/job"
LONGEST = 4096  # bytes of a job's description
TRY = 2.0  # seconds of one attempt to reach the meeting point


@dataclass(frozen=True, slots=True)
class Door:
    """Where to meet: `host` and `port`, and how many `hosts` the job begins with. `holds`: whether this agent holds the meeting
    point; None if its address decides."""

    host: str = "127.0.0.1"
    port: int = 0
    hosts: int = 1
    holds: bool | None = True

    @property
    def one_host(self) -> bool:
        """Whether no other agent is expected. Then this one takes a free port of the loopback device."""
        return self.port == 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_door(meet: str | None, hosts: int | None, environ: Mapping[str, str] = os.environ) -> Door:
    """From the command line or, for what it leaves out, from the variables that torchrun, srun or mpirun set."""
    launch = discover(environ)
    several = launch.world > 1
    if meet is None and not several:
        if hosts is not None and hosts > 1:
            raise LaunchError(f"--hosts {hosts}: where do they meet? Add --meet HOST:PORT, the address of one of them")
        return Door()
    if exported_secret(environ) is None:
        raise LaunchError(f"agents on several hosts need a secret: export {SECRET}=$(openssl rand -hex 32) (SECURITY.md)")
    if hosts is None and not several:
        raise LaunchError(f"--meet {meet}: how many hosts are there? Add --hosts H")
    return _door(meet, hosts, launch if several else ALONE)


def _door(meet: str | None, hosts: int | None, launch: Launch) -> Door:
    several = launch.world > 1
    holds = launch.rank == 0 if several else None
    count = hosts or launch.world
    if meet is not None:
        found = re.fullmatch(r"(\[[\w.:%]+\]|[\w.-]+)(?::(\d{1,5}))?", meet, re.ASCII)
        port = int(found[2] or DEFAULT_PORT) if found else 0
        if found is None or not 1 <= port <= 65535:
            raise LaunchError(f"--meet {meet!r} is not HOST:PORT, such as node0:{DEFAULT_PORT}")
        return Door(found[1].strip("[]"), port, count, holds)
    if launch.address is None:
        raise LaunchError(
            f"{launch.how} does not say where its processes meet: add --meet HOST:PORT, the address of one of the hosts"
        )
    # torchrun's agent listens at MASTER_PORT itself
    return Door(launch.address, launch.port + 1 if launch.agent_store else launch.port, count, holds)


def enter(door: Door, secret: str, seconds: float, stopped: Callable[[], bool]) -> tuple[MeetingPoint, Any]:
    """The meeting point, and its store if this agent holds it; None otherwise. TimeoutError after `seconds`.

    InterruptedError if `stopped()`.
    """
    until = time.monotonic() + seconds
    why = "it does not answer"
    while True:
        if door.holds is not False and (listener := _listen(door)) is not None:
            return _open(listener, door, secret)
        try:
            return bounded(TRY + 1.0, lambda: _find(door, secret), "phalanx-meeting"), None
        except (RuntimeError, TimeoutError, OSError) as error:
            if isinstance(error, WrongJobError):
                raise
            why = str(error).splitlines()[0]
        if stopped():
            raise InterruptedError
        if time.monotonic() > until:
            raise TimeoutError(f"the meeting point {door} does not answer within {seconds:g} s [{why}]")
        time.sleep(0.2)


def _listen(door: Door) -> socket.socket | None:
    """None if the meeting point is on another host, or another agent of this host has it."""
    if door.holds:
        try:
            return addresses.listen(door.host, door.port, 128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise WrongJobError(
                f"port {door.port} on {door.host} is in use, by another job or another program: choose another port"
            ) from None
    try:
        return addresses.listen_here(door.host, door.port, 128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise


def _open(listener: socket.socket, door: Door, secret: str) -> tuple[MeetingPoint, Any]:
    here, port = listener.getsockname()[:2]
    host = door.host if here in ("::", "0.0.0.0") else here
    token = secrets.token_hex(8)
    store: Any = serve(listener, host, 1, datetime.timedelta(seconds=60))
    store.set(JOB, Signer(secret, token).sign(JOB, json.dumps({"token": token})))
    return MeetingPoint(host, port, token), store


def _find(door: Door, secret: str) -> MeetingPoint:
    """The job that another agent has opened; RuntimeError if there is none yet."""
    probe(door.host, door.port, time.monotonic() + TRY)
    store = dist.TCPStore(door.host, door.port, None, False, datetime.timedelta(seconds=TRY), wait_for_workers=False)
    found = peek(store, JOB)
    if found is None:
        raise RuntimeError("there is a store, but no job yet")
    token = _token(found[:LONGEST])
    if token is None or not Signer(secret, token).recognises(JOB, found):
        raise WrongJobError(
            f"what answers at {door} is no job with this PHALANX_SECRET: export the same on all hosts, or choose another port"
        )
    return MeetingPoint(door.host, door.port, token)


def _token(found: bytes) -> str | None:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        token = json.loads(found[SIGNATURE + 1 :])["token"]
        if isinstance(token, str) and is_token(token):
            return token
    return None

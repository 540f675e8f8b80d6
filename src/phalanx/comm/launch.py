"""Who am I: rank, world and meeting point, from the environment that torchrun, mpirun or srun sets.

`discover(environ)` is a pure function to a frozen `Launch`. The meeting point is where rank 0 opens torch's key-value store. The
launchers differ in how much of it they provide:

    torchrun, or by hand   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: all of it
    srun                   the list of nodes: its first one, and a port derived from the job and step
    mpirun on one host     nothing: rank 0 takes a free loopback port and leaves a note for the other ranks
    mpirun on several      MASTER_ADDR if you export it, otherwise mpi4py carries the address
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

MOST_RANKS = 1 << 20  # more is a typing error
DEFAULT_PORT = 29400  # for a MASTER_ADDR without a MASTER_PORT
LISTENER = "PHALANX_LISTENER"  # set by start.py for rank 0
SECRET = "PHALANX_SECRET"  # signs what ranks write to the store (signed.py)
SHORTEST_SECRET = 16  # characters
LAUNCHERS = frozenset(
    {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prted", "prte", "prun"}
)


class LaunchError(RuntimeError):
    """The environment describes several ranks, but not how they find each other."""


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among its siblings. Without `address` the ranks meet by a note on this host, or through mpi4py."""

    how: str
    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1
    address: str | None = None
    port: int = 0
    agent_store: bool = False  # torchrun's agent already holds the store at that address
    attempt: int = 0  # of an elastic torchrun: keys of an earlier attempt are not ours
    job: str = ""  # the launcher's name for the job, the same on all its ranks
    one_host: bool = False  # all ranks are on this host, by the launcher's word
    listener: int = -1  # for rank 0: the file descriptor of the meeting point's socket, if its parent has opened it


ALONE = Launch(how="alone", rank=0, world=1)


def discover(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's variables; an inner launcher (torchrun under srun, mpirun under srun) comes before the outer."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpirun(
            environ, "mpirun (Open MPI)", *(f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        )
    if "PMI_RANK" in environ and "PMI_SIZE" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return _mpirun(environ, "mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    # SLURM_NTASKS is also set in a batch script without srun, which is one process, not SLURM_NTASKS
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _srun(environ)
    return ALONE


def _torchrun(environ: Mapping[str, str]) -> Launch:
    launch = Launch(
        how="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        rank=_number(environ, "RANK"),
        world=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_world=_number(environ, "LOCAL_WORLD_SIZE", 1),
        one_host=_number(environ, "LOCAL_WORLD_SIZE", 0) == _number(environ, "WORLD_SIZE"),
        address=environ.get("MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT", DEFAULT_PORT),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
        listener=_number(environ, LISTENER, -1),
    )
    if launch.world > 1 and not launch.address:
        raise LaunchError(f"WORLD_SIZE={launch.world} but no MASTER_ADDR: export the host of rank 0, or start with torchrun")
    return _checked(launch)


def _mpirun(environ: Mapping[str, str], how: str, rank: str, size: str, local_rank: str, local_size: str) -> Launch:
    world = _number(environ, size)
    return _checked(
        Launch(
            how=how,
            rank=_number(environ, rank),
            world=world,
            local_rank=_number(environ, local_rank, 0),
            local_world=_number(environ, local_size, world),
            one_host=_number(environ, local_size, 0 if environ.get("MASTER_ADDR") else world) == world,
            address=environ.get("MASTER_ADDR"),
            port=_number(environ, "MASTER_PORT", DEFAULT_PORT),
            job=environ.get("PMIX_NAMESPACE", ""),
        )
    )


def _srun(environ: Mapping[str, str]) -> Launch:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    address = environ.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise LaunchError("srun gave no SLURM_STEP_NODELIST: export MASTER_ADDR, the host of rank 0")
    # every rank computes the same port without a message; jobs that share a node differ in it
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return _checked(
        Launch(
            how="srun",
            rank=_number(environ, "SLURM_PROCID"),
            world=_number(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(environ, "SLURM_LOCALID", 0),
            one_host=environ.get("SLURM_STEP_NUM_NODES", "1" if first_host(nodes) == nodes else "") == "1",
            address=address,
            port=_number(environ, "MASTER_PORT", 20000 + zlib.crc32(step.encode()) % 10000),
            job=step,
        )
    )


def exported_secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """The secret of the job, if the environment carries one to all ranks."""
    secret = environ.get(SECRET)
    if secret is not None and len(secret) < SHORTEST_SECRET:
        raise LaunchError(f"{SECRET} has {len(secret)} characters, fewer than {SHORTEST_SECRET}: use $(openssl rand -hex 32)")
    return secret


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environ.get(key)
    if text is None:
        if default is None:
            raise LaunchError(f"{key} is not set, but others of its launcher are: unset them all, or start with one launcher")
        return default
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", text, re.ASCII):
        raise LaunchError(f"{key}={text!r} is not a number")
    return int(text)


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.rank < launch.world:
        raise LaunchError(f"{launch.how} says rank {launch.rank} of {launch.world}: ranks run from 0 to {launch.world - 1}")
    if launch.world > MOST_RANKS:
        raise LaunchError(f"{launch.how} says that there are {launch.world} ranks: at most {MOST_RANKS} are possible")
    if launch.local_rank < 0 or launch.local_world < 1:
        raise LaunchError(f"{launch.how} says local rank {launch.local_rank} of {launch.local_world}: they count from 0")
    if launch.world > 1 and launch.address is not None and not 1 <= launch.port <= 65535:
        raise LaunchError(f"MASTER_PORT={launch.port}: a port is a number from 1 to 65535")
    if launch.world > 1 and launch.address is not None and not _is_host(launch.address):
        raise LaunchError(f"MASTER_ADDR={launch.address!r} is not the name or the address of a host")
    return launch


def _is_host(address: str) -> bool:
    """Whether it can be looked up at all; Python rejects some names with an error that no caller expects."""
    try:
        address.encode("idna")
    except UnicodeError:
        return False
    return re.fullmatch(r"[\w.:%-]+", address) is not None  # a colon and a percent sign: fe80::1%eth0


def first_host(nodes: str) -> str:
    """The first name of Slurm's compressed list: `gpu[007-012,20],cpu1` begins with gpu007."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)  # up to a comma outside of brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


# ---- mpirun names no meeting point ------------------------------------------------------------------------------------------


def meeting_point_through_mpi4py() -> tuple[str, int]:
    """The host of rank 0 and a free port there, broadcast by MPI itself; all ranks call it."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise LaunchError(
            "mpirun started ranks on several hosts, but does not say where rank 0 is: "
            "export it (mpirun -x MASTER_ADDR=host0 ..., MPICH: -genv MASTER_ADDR host0) or pip install mpi4py"
        ) from None
    with socket.socket() as probe:
        probe.bind(("", 0))
        words = f"{socket.gethostname()} {probe.getsockname()[1]}"
    text = bytearray(words.encode().ljust(256, b"\0"))
    MPI.COMM_WORLD.Bcast(text)  # as bytes: the lower-case bcast would pickle
    host, port = text.rstrip(b"\0").decode().split()
    return host, int(port)

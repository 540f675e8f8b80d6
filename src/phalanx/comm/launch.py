"""Finds out this process's rank, world and meeting point from the environment that torchrun, mpirun or srun sets.

`discover(environ)` is a pure function that returns a frozen `Launch`. The meeting point is where rank 0 opens torch's key-value
store. Launchers differ in how much they provide:

    torchrun, or by hand   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: everything
    srun                   the list of nodes: we take the first, and a port derived from the job and step
    mpirun on one host     nothing: rank 0 takes a free loopback port and leaves a note for the other ranks
    mpirun on several      MASTER_ADDR if you export it, otherwise mpi4py carries the address

The local rank selects the GPU. If a script exports only RANK and WORLD_SIZE, the launcher below it provides the local rank
(`PLACES`). If that does not, `Launch.placed` is False, and `place_among` computes it from the hosts of all ranks.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

MOST_RANKS = 1 << 20  # more is a typo
DEFAULT_PORT = 29400  # for a MASTER_ADDR without a MASTER_PORT
LISTENER = "PHALANX_LISTENER"  # set by start.py for rank 0
SECRET = "PHALANX_SECRET"  # signs what ranks write to the store (signed.py)
MEETING, MEMBER = "PHALANX_ELASTIC", "PHALANX_MEMBER"  # set by `phalanx run` for its ranks
SHORTEST_SECRET = 16  # characters
LAUNCHERS = frozenset(
    {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prted", "prte", "prun"}
)


class LaunchError(RuntimeError):
    """The environment describes several ranks but not how they find each other, or more ranks than the host has GPUs."""


class PlaceNames(NamedTuple):
    """The variables in which a launcher passes a process its rank, the number of ranks, and the same two for its host."""

    rank: str
    world: str
    local_rank: str
    local_world: str


OPEN_MPI = PlaceNames(*(f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
MPICH = PlaceNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # Hydra: MPICH, Intel MPI
SLURM = PlaceNames("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")  # see `_slurm_tasks_here`
PLACES = (
    OPEN_MPI,
    MPICH,
    PlaceNames("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
    PlaceNames("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # Cray's PALS
    PlaceNames("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH
    PlaceNames("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    PlaceNames("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),  # jsrun
    SLURM,  # last: mpirun may run inside srun
)


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among its siblings. Without `address` the ranks meet through a note on this host, or through mpi4py."""

    how: str
    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1
    address: str | None = None
    port: int = 0
    agent_store: bool = False  # torchrun's agent already holds the store at that address
    attempt: int = 0  # of an elastic torchrun: ignore the keys of earlier attempts
    job: str = ""  # the launcher's name for the job, the same on all its ranks
    one_host: bool = False  # whether all ranks are on this host, according to the launcher
    listener: int = -1  # for rank 0: the file descriptor of the meeting point's socket, if its parent opened it
    placed: bool = True  # whether `local_rank` is the launcher's; if not, the hosts of all ranks decide


ALONE = Launch(how="alone", rank=0, world=1)


def discover(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's variables. An inner launcher (torchrun or mpirun under srun) takes precedence over the outer one."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpirun(environ, "mpirun (Open MPI)", OPEN_MPI)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return _mpirun(environ, "mpirun (MPICH)", MPICH)
    # SLURM_NTASKS is also set in a batch script without srun, which is a single process
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return _srun(environ)
    return ALONE


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank, local_world = _place_below(environ, rank, world) if "LOCAL_RANK" not in environ else (None, None)
    launch = Launch(
        how="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", local_rank or 0),
        local_world=_number(environ, "LOCAL_WORLD_SIZE", local_world or 1),
        placed="LOCAL_RANK" in environ or local_rank is not None or world == 1,
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


def _mpirun(environ: Mapping[str, str], how: str, names: PlaceNames) -> Launch:
    rank, world = _number(environ, names.rank), _number(environ, names.world)
    local_rank = _place_below(environ, rank, world)[0]
    return _checked(
        Launch(
            how=how,
            rank=rank,
            world=world,
            local_rank=local_rank or 0,
            local_world=_number(environ, names.local_world, world),
            placed=local_rank is not None or world == 1,
            one_host=_number(environ, names.local_world, 0 if environ.get("MASTER_ADDR") else world) == world,
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
    # every rank computes the same port without a message, and jobs that share a node get different ones
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return _checked(
        Launch(
            how="srun",
            rank=_number(environ, "SLURM_PROCID"),
            world=_number(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(environ, "SLURM_LOCALID", 0),
            local_world=_slurm_tasks_here(environ) or 1,
            placed="SLURM_LOCALID" in environ,
            one_host=environ.get("SLURM_STEP_NUM_NODES", "1" if first_host(nodes) == nodes else "") == "1",
            address=address,
            port=_number(environ, "MASTER_PORT", 20000 + zlib.crc32(step.encode()) % 10000),
            job=step,
        )
    )


# ---- the place on the host, which selects the GPU ------------------------------------------------------------------------------


def _place_below(environ: Mapping[str, str], rank: int, world: int) -> tuple[int | None, int | None]:
    """Return the local rank and the local number of ranks from a launcher that counts the same ranks as we do, if there is one.

    A launcher that counts others, such as a batch system that started one process per host, gives the place of that process.
    """
    for names in PLACES:
        if environ.get(names.local_rank) is None:
            continue
        if _number(environ, names.rank, -1) == rank and _number(environ, names.world, -1) == world:
            local_world = _slurm_tasks_here(environ) if names is SLURM else _number(environ, names.local_world, 0) or None
            return _number(environ, names.local_rank), local_world
    return None, None


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the tasks of this step on this node: `4(x2),3` means 4 on the first two nodes and 3 on the third."""
    node = _number(environ, "SLURM_NODEID", -1)
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip(), re.ASCII)
        if found is None or node < 0:
            return None
        if node < int(found[2] or 1):
            return int(found[1])
        node -= int(found[2] or 1)
    return None


def place_among(launch: Launch, keys: Sequence[str]) -> Launch:
    """Return `launch` with the place of its rank on its host. `keys[rank]` is the same text for all ranks of a host."""
    here = [rank for rank, key in enumerate(keys) if key == keys[launch.rank]]
    return replace(launch, local_rank=here.index(launch.rank), local_world=len(here), placed=True)


def device_index(local_rank: int, local_world: int, count: int) -> int:
    """Return the GPU of a rank among the `count` that it sees. NCCL refuses two ranks on one GPU, so there must be enough.

    A rank that sees one GPU takes it: Slurm's --gpus-per-task and many wrappers show each rank only its own. If all ranks see the
    same one, `check_own_devices` finds out.
    """
    if count < 1:
        raise LaunchError("no GPU is visible: is CUDA_VISIBLE_DEVICES empty? backend='gloo' trains on CPUs")
    if count == 1:
        return 0
    if local_rank >= count:
        raise LaunchError(
            f"{max(local_world, local_rank + 1)} ranks on this host, but {count} GPUs: local rank {local_rank} has none; NCCL "
            f"takes one rank per GPU. Start at most {count} ranks per host, or create the communicator with backend='gloo'"
        )
    return local_rank


def check_own_devices(devices: Sequence[str]) -> None:
    """Raise if two ranks have the same GPU. `devices[rank]` names one GPU of the whole job, such as its host and UUID."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    if shared := {device: own for device, own in ranks.items() if len(own) > 1}:
        device, own = next(iter(shared.items()))
        more = f" ({len(shared)} GPUs are shared in all)" if len(shared) > 1 else ""
        raise LaunchError(
            f"ranks {', '.join(map(str, own))} all have GPU {device}{more}, and NCCL takes one rank per GPU. Start as many ranks "
            "per host as it has GPUs, show each rank its own by CUDA_VISIBLE_DEVICES, or make the communicator with "
            "backend='gloo'"
        )


def exported_secret(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the secret of the job, if the environment carries one to all ranks."""
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
    """Whether `address` can be looked up at all. Python rejects some names with an error that no caller expects."""
    try:
        address.encode("idna")
    except UnicodeError:
        return False
    return re.fullmatch(r"[\w.:%-]+", address) is not None  # a colon and a percent sign: fe80::1%eth0


def first_host(nodes: str) -> str:
    """Return the first name of Slurm's compressed list: `gpu[007-012,20],cpu1` begins with gpu007."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)  # up to a comma outside brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


# ---- mpirun names no meeting point ------------------------------------------------------------------------------------------


def meeting_point_through_mpi4py() -> tuple[str, int]:
    """Return the host of rank 0 and a free port there, broadcast by MPI itself. All ranks call it."""
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
    MPI.COMM_WORLD.Bcast(text)  # as bytes, because the lower-case bcast would pickle
    host, port = text.rstrip(b"\0").decode().split()
    return host, int(port)

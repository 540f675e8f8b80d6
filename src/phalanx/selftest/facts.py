"""What each rank reports about itself: host, device, versions, network, cores. It all goes into the bug report."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from typing import Any

import torch

import phalanx
from phalanx._torch_private import has_context
from phalanx.comm.addresses import interface_towards, own_address
from phalanx.comm.communicator import Communicator
from phalanx.comm.launch import SECRET, LaunchError, discover
from phalanx.native.core import SWITCHED_OFF, UNAVAILABLE, is_native

Facts = dict[str, Any]

# Variables that affect how ranks find each other, which devices they see and how they compute.
VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MASTER_", "PHALANX_")


def find_device() -> torch.device:
    """The GPU of this rank, which `create_communicator` has made the current one, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def gather_facts(comm: Communicator, device: torch.device) -> list[Facts]:
    """The facts of all ranks, in rank order, on all ranks."""
    return comm.allgather_obj(own_facts(comm, device))


def own_facts(comm: Communicator, device: torch.device) -> Facts:
    """The facts of this rank, as plain data."""
    return {
        "rank": comm.rank,
        "host": socket.gethostname(),
        "host_number": comm.inter_rank,
        "pid": os.getpid(),
        "device": str(device),
        "gpu": _gpu(device),
        "contexts": contexts_elsewhere(device),
        "versions": versions(),
        "network": _network(),
        "cores": sorted(os.sched_getaffinity(0)),
        "cores_of_host": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "native_core": _native_core(),
        "shares_memory": comm.shares_memory,
        "environment": {key: value for key, value in os.environ.items() if key.startswith(VARIABLES) and key != SECRET},
    }


def versions() -> dict[str, str]:
    """Versions of everything that should match on all ranks."""
    found = {"phalanx": phalanx.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        with contextlib.suppress(AttributeError, RuntimeError):  # a torch without NCCL
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def contexts_elsewhere(device: torch.device) -> list[int] | None:
    """Other GPUs on which this process has a context, which costs hundreds of MB there; None if unknown."""
    if device.type != "cuda" or torch.version.hip:  # ROCm gives wrong answers
        return None
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    found = [has_context(index) for index in others]
    return None if None in found else [index for index, own in zip(others, found) if own]


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "uuid": str(getattr(found, "uuid", "")),  # torch 2.6 and later have it
        "memory": found.total_memory,
        "visible": torch.cuda.device_count(),
    }


def _network() -> dict[str, Any]:
    """The interface and address that this rank uses, and the alternatives."""
    try:
        launch = discover()
    except LaunchError:
        launch = None
    towards = (launch.address if launch else None) or "127.0.0.1"
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    try:
        address = own_address(named, towards)
    except OSError:
        address = ""
    return {
        "interfaces": [name for _, name in socket.if_nameindex()],
        "interface": named or interface_towards(towards, 9) or "",
        "address": address,
        "rank_0": towards,
    }


def _native_core() -> dict[str, Any]:
    if UNAVAILABLE:
        return {"there": False, "why": UNAVAILABLE}
    if not is_native():
        return {"there": False, "why": SWITCHED_OFF}
    from phalanx import _native

    return {"there": True, "kernels": _native.kernels()}

"""The first and the last record of a benchmark: what was measured, on which machine, and what else was running there."""

from __future__ import annotations

import os
import platform
import resource
import socket
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import phalanx
from phalanx.bench.config import Bench
from phalanx.bench.cores import CORES

if TYPE_CHECKING:
    from phalanx.comm.communicator import Communicator

Record = dict[str, Any]


def first_record(bench: Bench, comm: Communicator, launcher: str) -> Record:
    """Config, versions, hosts and schedule; all ranks call it."""
    return {
        "config": {"verb": bench.verb, "ranks": comm.size, **asdict(bench)},
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "versions": {"phalanx": phalanx.__version__, "python": platform.python_version(), "kernel": platform.release()}
        | {name: found for name in ("torch", "mpi4py", "horovod", "decent-dp") if (found := _version(name))},
        "hosts": sorted(set(comm.allgather_obj(socket.gethostname()))),
        "processor": processor(),
        "cores": len(CORES),
        "threads_per_rank": 1,
        "native_core": _native_core(),
        "launcher": launcher,
        "schedule": comm.schedule.name,
    }


def _native_core() -> str:
    """The instruction set of the native core, or why there is none."""
    from phalanx.native.core import UNAVAILABLE

    if UNAVAILABLE:
        return UNAVAILABLE
    from phalanx import _native

    return _native.kernels()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The name of the processor, or its architecture if it has no name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


class Company:
    """Measures how busy other processes keep this host during the benchmark, which makes the figures less reliable."""

    def __init__(self) -> None:
        self.begun, self.busy, self.own = time.monotonic(), _busy_seconds(), _own_seconds()

    def last_record(self, comm: Communicator) -> Record:
        """Duration, and the cores that other processes used on the host of rank 0. All ranks call it."""
        seconds = time.monotonic() - self.begun
        here = socket.gethostname()
        own = sum(spent for host, spent in comm.allgather_obj((here, _own_seconds() - self.own)) if host == here)
        busy = _busy_seconds()
        others = None if busy is None or self.busy is None else round(max(0.0, busy - self.busy - own) / seconds, 2)
        return {"seconds": round(seconds, 1), "cores_used_by_others": others}


def _busy_seconds() -> float | None:
    """Busy seconds of all processors since boot; None if the system does not tell."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]  # user includes guests
    except OSError:
        return None
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

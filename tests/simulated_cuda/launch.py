"""`launch(4, fn)`: the ranks of a job as simulated processes, each with a communicator made by the product's own way.

The product is written for one process per rank. What it keeps in module globals is kept per simulated process here, and what a
thread cannot do for a process (exit hooks, shared memory, secrets in files) is left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from tests.simulated_cuda.conductor import Clock, Over
from tests.simulated_cuda.distributed import FUNCTIONS, Distributed, init_process_group
from tests.simulated_cuda.host_threads import HostQueues, HostThreads
from tests.simulated_cuda.simulation import Process, Simulation, process, simulation

T = TypeVar("T")


def launch(world: int, fn: Callable[[Any], T], *, algorithm: Any = None, timeout: float = 60.0) -> list[T]:
    """Run `fn(comm)` on every rank and return the results in rank order; raises what a rank raised, its own errors first."""
    import phalanx

    def play(rank: int) -> T:
        comm = phalanx.create_communicator(algorithm, timeout=timeout)
        try:
            return fn(comm)
        except Exception as error:
            comm._connection._watch.raised(error)  # what the hook for uncaught exceptions does in a real process
            raise
        finally:
            if process().alive:
                comm.close()

    return run_ranks(world, play)


def run_ranks(world: int, fn: Callable[[int], T]) -> list[T]:
    """Run `fn(rank)` in simulated processes whose torch.distributed is initialised, each on the GPU of its local rank."""
    from phalanx.comm.failure import CommunicationError

    made = simulation()
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def play(rank: int) -> None:
        try:
            torch.cuda.set_device(process().local)
            init_process_group(rank=rank, world_size=world)
            results[rank] = fn(rank)
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)

    made.own.pop("world", None)
    job = [Process(made, rank, rank // made.gpus, rank % made.gpus) for rank in range(world)]
    made.processes += job
    with product_on(made):
        threads = [made.conductor.start(f"rank {own.rank}", own, functools.partial(play, own.rank)) for own in job]
        made.conductor.wait(lambda: all(thread.finished for thread in threads), None, "its ranks")
        for own in job:
            made.conductor.end(own)
        made.conductor.wait(lambda: not any(t.process in job for t in made.conductor.threads), None, "the ranks' threads")
    if errors:
        raise next((error for error in errors if not isinstance(error, CommunicationError)), errors[0])
    made.drain()
    return results


def die() -> None:
    """The calling rank is killed: its threads end, its kernels never become ready, its connections break."""
    own = process()
    own.alive = False
    simulation().conductor.end(own)
    raise Over


def hang(name: str) -> None:
    """Kernels of the calling rank's NCCL whose name contains `name` never become ready from now on."""
    process().own["hang"] = lambda kernel: name in kernel
    process().own["disturbed"] = True


# ---- the product, as simulated processes ---------------------------------------------------------------------------------------

PACKAGES = ("comm", "grad", "optim", "native")


@functools.cache
def _load() -> None:
    """Modules of the product that ranks import when they need them: inside of a rank they would see the real threads."""
    for package in PACKAGES:
        root = importlib.import_module(f"phalanx.{package}")
        for found in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
            importlib.import_module(found.name)


class PerProcess(MutableMapping[Any, Any]):
    """A dict that is another one in every simulated process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _own(self) -> dict[Any, Any]:
        found: dict[Any, Any] = process().own.setdefault(self._name, {})
        return found

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


class CountPerProcess:
    """An itertools.count that is another one in every simulated process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __next__(self) -> int:
        return next(process().own.setdefault(self._name, itertools.count()))  # type: ignore[no-any-return]


Site = tuple[types.ModuleType, str, Callable[[dict[str, Any]], Any]]  # where, and what to put there, given the stand-ins


@functools.cache
def _sites(modules: tuple[str, ...]) -> list[Site]:
    """Every name in these modules of the product that a simulated process sees otherwise."""
    import queue
    import threading
    import time

    import torch.distributed as dist

    stands_for = {id(threading): "threading", id(queue): "queue", id(time): "time", id(dist): "dist"}
    found: list[Site] = []
    for module in map(sys.modules.__getitem__, modules):
        for name, value in list(vars(module).items()):
            key = f"{module.__name__}.{name}"
            in_comm = module.__name__.startswith("phalanx.comm") and not name.startswith("__")
            if id(value) in stands_for:
                found.append((module, name, operator.itemgetter(stands_for[id(value)])))
            elif in_comm and name in LEFT_OUT:
                found.append((module, name, lambda stand_ins, value=LEFT_OUT[name]: value))
            elif callable(value) and (getattr(value, "__module__", None) or "").startswith("torch.distributed"):
                function = getattr(value, "__name__", "")
                if function in FUNCTIONS:
                    found.append((module, name, lambda stand_ins, function=function: getattr(stand_ins["dist"], function)))
            elif in_comm and name.startswith("_") and isinstance(value, itertools.count):
                found.append((module, name, lambda stand_ins, key=key: CountPerProcess(key)))
            elif in_comm and name.startswith("_") and type(value) is dict and not value:  # filled at run time
                found.append((module, name, lambda stand_ins, key=key: PerProcess(key)))
    return found


@contextlib.contextmanager
def product_on(made: Simulation) -> Iterator[None]:
    """Inside, the product's modules see simulated threads, time, queues and torch.distributed."""
    _load()
    made.own["dist"] = fake = Distributed()
    conductor = made.conductor
    stand_ins = {"threading": HostThreads(conductor), "queue": HostQueues(conductor), "time": Clock(conductor), "dist": fake}
    undo: list[tuple[Any, str, Any]] = []
    try:
        for module, name, make in _sites(tuple(name for name in sys.modules if name.split(".")[0] == "phalanx")):
            undo.append((module, name, getattr(module, name)))
            setattr(module, name, make(stand_ins))
        yield
    finally:
        for module, name, value in undo:
            setattr(module, name, value)


class _NoSharedMemory:
    """Ranks that are threads would wait for each other inside of C++, where no other thread gets its turn."""

    @staticmethod
    def join(*args: Any, **kwargs: Any) -> None:
        return None


LEFT_OUT: dict[str, Any] = {
    "host_key": lambda: f"simulated host {process().host}",
    "share_secret": lambda *args, **kwargs: None,
    "guard": lambda *args, **kwargs: None,
    "end_unaware": lambda *args, **kwargs: None,
    "own_address": lambda *args, **kwargs: "127.0.0.1",
    "HostTeam": _NoSharedMemory,
}

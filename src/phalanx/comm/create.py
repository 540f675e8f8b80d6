"""How a communicator comes to be: from a launcher, from the user's own process group, alone, or as threads (`run_local`)."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.comm.choose import for_world
from phalanx.comm.communicator import Communicator, prepare
from phalanx.comm.ending import end_unaware, guard
from phalanx.comm.failure import CommunicationError, Watch
from phalanx.comm.hosts import Hosts, host_key
from phalanx.comm.issuer import Issuer
from phalanx.comm.launch import discover
from phalanx.comm.planned import tell_if_unplanned
from phalanx.comm.settings import check_timeout, forced_form
from phalanx.comm.transports.local import LocalTransport, LocalWorld
from phalanx.native.team import HostTeam
from phalanx.schedule import Schedule, ScheduleError, lower, verify

T = TypeVar("T")
_made = itertools.count()  # the same on all ranks, which make their communicators in one order


def create_communicator(algorithm: Schedule | None = None, *, backend: str | None = None, timeout: float = 60.0) -> Communicator:
    """The communicator of all ranks of this job.

    Under torchrun, mpirun and srun it finds the others by itself; after the user's own `init_process_group` it uses that; without
    a launcher it is a world of one. `algorithm` is the schedule of its all-reduces, by default the best for the hosts found.
    `backend` is torch's ("gloo", "nccl", "cpu:gloo,cuda:nccl"), by default what the machine has. `timeout`, in seconds, bounds
    every wait.
    """
    _check(algorithm, timeout)
    forced_form()  # before anything is sent: nonsense in the environment should not leave the others waiting
    from phalanx.comm.rendezvous import watch_stores
    from phalanx.comm.transports.torch import TorchTransport, already_initialized

    hook = sys.excepthook  # as the user left it: torch wraps it
    if already_initialized():
        if backend is not None:
            raise ValueError(
                f"backend={backend!r}: torch.distributed is initialised already; leave backend out to use it as it is"
            )
        _check_world(algorithm, dist.get_world_size())
        transport = TorchTransport.adopt(timeout)
    else:
        launch = discover()
        _check_world(algorithm, launch.world)
        if launch.world == 1:
            return _alone(algorithm, timeout)
        transport = TorchTransport.join(launch, backend, timeout)
    rank, size = transport.rank, transport.size
    made = next(_made)
    store, ear, held = watch_stores(transport.store, f"phalanx/watch/{made}", timeout, transport.signer)
    watch = Watch(rank, size, store, ear, timeout=timeout, store_rank=0 if held else None, end=end_unaware)
    issuer = Issuer(timeout, watch, transport.cut)
    transport.got_on = issuer.got_on
    issuer.traffic = transport.traffic
    guard(watch, hook)
    # the keys of all hosts, over the store: the communicator that could gather them needs them to exist
    store.set(f"host/{rank}", host_key())
    with transport.met:
        keys = [key.decode() for key in store.multi_get([f"host/{r}" for r in range(size)])]
    if algorithm is None:
        tell_if_unplanned(Hosts.of(keys))
    prepare(transport, range(size), algorithm or for_world(Hosts.of(keys), library=transport.library))
    # the name is part of every tag: two communicators of one process share the connections, and must not share messages
    name = f"world {made}" if made else "world"

    def share(name: str, rank: int, size: int) -> HostTeam | None:
        if transport.compares:
            return None
        return HostTeam.join(store, rank, size, timeout=issuer.patience, name=name)

    return Communicator(name, range(size), rank, transport, issuer, watch, keys, algorithm, share=share)


def run_local(
    n: int, fn: Callable[[Communicator], T], *, algorithm: Schedule | None = None, timeout: float = 60.0, hosts: int = 1
) -> list[T]:
    """Call `fn(comm)` on `n` ranks that are threads of this process, and return their results in rank order.

    For tests and notebooks: the same schedules and errors as a real job, no launcher. `hosts` pretends that the ranks are spread
    evenly, in rank order, over so many hosts. The first exception of a rank is raised here, after the others were told.
    """
    if n < 1 or hosts < 1 or n % hosts:
        raise ValueError(f"run_local({n}, hosts={hosts}): at least one rank, spread evenly over the hosts")
    _check(algorithm, timeout)
    _check_world(algorithm, n)
    world = LocalWorld(n)
    store: Any = dist.HashStore()  # its type lacks multi_set, the object has it
    results: list[Any] = [None] * n
    errors: list[tuple[int, BaseException]] = []

    def play(rank: int) -> None:
        watch = Watch(rank, n, store, store, timeout=timeout, store_rank=None)
        comm = Communicator(
            "world",
            range(n),
            rank,
            LocalTransport(world, rank),
            Issuer(timeout, watch),
            watch,
            [f"host {r * hosts // n}" for r in range(n)],
            algorithm,
        )
        try:
            results[rank] = fn(comm)
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            errors.append((rank, error))
            watch.raised(error)
        finally:
            comm.close()

    threads = [threading.Thread(target=play, args=(rank,), name=f"phalanx-rank-{rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.close()
    if errors:
        # an error of a rank's own tells more than the CommunicationErrors that it caused on the others
        raise next((error for _, error in errors if not isinstance(error, CommunicationError)), errors[0][1])
    return results


def _alone(algorithm: Schedule | None, timeout: float) -> Communicator:
    return Communicator("world", [0], 0, LocalTransport(LocalWorld(1), 0), Issuer(timeout, None), None, [host_key()], algorithm)


def _check(algorithm: Schedule | None, timeout: float) -> None:
    if algorithm is not None and not isinstance(algorithm, Schedule):
        raise TypeError(f"algorithm is a Schedule such as phalanx.torus(2, 4), or None; got {type(algorithm).__name__}")
    check_timeout(timeout)


def _check_world(algorithm: Schedule | None, world: int) -> None:
    """Before anything is sent: the schedule is for this world, and it is an all-reduce."""
    if algorithm is None:
        return
    if algorithm.world != world:
        raise ScheduleError(f"{algorithm.name} is for {algorithm.world} ranks, but this job has {world}")
    if algorithm.goal != "sum":
        raise ScheduleError(f"{algorithm.name} computes a {algorithm.goal}, not the sum that an all-reduce is")
    verify(algorithm)
    verify(lower(algorithm))

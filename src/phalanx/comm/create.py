"""Creates a communicator: from a launcher, from your own process group, alone, or with threads as ranks (`run_local`)."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.comm.arguments import check_all_reduce
from phalanx.comm.choose import choose
from phalanx.comm.communicator import Communicator
from phalanx.comm.connection import Connection, prepare
from phalanx.comm.ending import end_unaware, guard
from phalanx.comm.failure import CommunicationError, Watch
from phalanx.comm.hosts import Hosts, host_key
from phalanx.comm.issuer import Issuer
from phalanx.comm.launch import MEETING, LaunchError, discover
from phalanx.comm.members import Members
from phalanx.comm.planned import warn_if_unplanned
from phalanx.comm.settings import check_ranks, check_timeout, forced_form
from phalanx.comm.transports.local import LocalTransport, LocalWorld
from phalanx.native.team import HostTeam
from phalanx.schedule import Schedule

T = TypeVar("T")
_made = itertools.count()  # the same on all ranks, because they create their communicators in one order


def create_communicator(
    algorithm: Schedule | None = None,
    *,
    backend: str | None = None,
    timeout: float = 60.0,
    elastic: bool = False,
    min_ranks: int = 1,
    max_ranks: int | None = None,
) -> Communicator:
    """Make the communicator of all ranks of this job.

    Under torchrun, mpirun and srun it finds the other ranks by itself. After your own `init_process_group` it uses that group.
    Without a launcher it is a world of one.

    Args:
        algorithm: The schedule of all-reduces, such as `phalanx.torus(2, 4)`. The default is the best for the hosts found.
        backend: torch's: "gloo", "nccl" or "cpu:gloo,cuda:nccl". The default is what the machine has.
        timeout: Seconds that bound every wait.
        elastic: Outlive dead ranks, and let new ones join. Start the ranks with `phalanx run`.
        min_ranks: With `elastic`: pause between two steps while there are fewer.
        max_ranks: With `elastic`: let no more than this many join.

    Returns:
        The communicator. Use it as a context manager, or call `close()`.

    Raises:
        CommunicationError: Some ranks are missing after `timeout`.
        LaunchError: The launcher's variables contradict each other.
        ScheduleError: `algorithm` is not an all-reduce of this number of ranks.

    Example:
        >>> with phalanx.create_communicator() as comm:
        ...     comm.rank, comm.size
        (0, 1)
    """
    _check(algorithm, timeout)
    forced_form()  # before anything is sent, so that a wrong setting does not leave the other ranks waiting
    _check_elastic(elastic, min_ranks, max_ranks, backend)
    if elastic:
        from phalanx.comm.elastic.create import create_elastic_communicator

        return create_elastic_communicator(algorithm, timeout=timeout, min_ranks=min_ranks, max_ranks=max_ranks)
    from phalanx.comm.rendezvous import watch_stores
    from phalanx.comm.transports.torch import adopt, already_initialized, join

    hook = sys.excepthook  # the user's: torch wraps it
    if already_initialized():
        if backend is not None:
            raise ValueError(
                f"backend={backend!r}: torch.distributed is already initialised; leave backend out to use it as it is"
            )
        _check_world(algorithm, dist.get_world_size())
        transport = adopt(timeout)
    else:
        launch = discover()
        _check_world(algorithm, launch.world)
        if launch.world == 1:
            if MEETING in os.environ:
                raise LaunchError("`phalanx run` started this rank: pass elastic=True, or each of its ranks would train alone")
            return _alone(algorithm, timeout)
        transport = join(launch, backend, timeout)
    rank, size = transport.rank, transport.size
    made = next(_made)
    store, listening, held = watch_stores(transport.store, f"phalanx/watch/{made}", timeout, transport.signer)
    watch = Watch(rank, size, store, listening, timeout=timeout, store_rank=0 if held else None, end=end_unaware)
    issuer = Issuer(timeout, watch, transport.cut)
    transport.got_on = issuer.activity.got_on
    issuer.activity.traffic = transport.traffic
    guard(watch, hook)
    # the host keys go through the store, because a communicator needs them before it can gather anything
    store.set(f"host/{rank}", host_key())
    with transport.met:
        keys = [key.decode() for key in store.multi_get([f"host/{r}" for r in range(size)])]
    if algorithm is None:
        warn_if_unplanned(Hosts.of(keys))
    prepare(transport, range(size), algorithm or choose(Hosts.of(keys), library=transport.library).schedule)
    # the name is part of every tag: two communicators of one process share connections, but not messages
    name = f"world {made}" if made else "world"

    def share(name: str, rank: int, size: int) -> HostTeam | None:
        if transport.compares:
            return None
        return HostTeam.join(store, rank, size, timeout=issuer.breakdown.patience, name=name)

    members = Members(name, tuple(range(size)), rank, tuple(keys))
    return Communicator(Connection(members, transport, issuer, watch, algorithm, share=share))


def run_local(
    n: int, fn: Callable[[Communicator], T], *, algorithm: Schedule | None = None, timeout: float = 60.0, hosts: int = 1
) -> list[T]:
    """Run a function on ranks that are threads of this process.

    For tests and notebooks: the same schedules and errors as in a real job, without a launcher.

    Args:
        n: The number of ranks.
        fn: Called with the communicator of its rank.
        algorithm: As in `create_communicator`.
        timeout: As in `create_communicator`.
        hosts: Pretend that the ranks are spread evenly, in rank order, over this number of hosts.

    Returns:
        The results of `fn` in rank order.

    Raises:
        Exception: What `fn` raised on some rank; the other ranks get a CommunicationError that names it.
        ValueError: The ranks cannot be spread evenly over the hosts.

    Example:
        >>> phalanx.run_local(3, lambda comm: comm.all_reduce(torch.ones(1)).item())
        [3.0, 3.0, 3.0]
    """
    if n < 1 or hosts < 1 or n % hosts:
        raise ValueError(f"run_local({n}, hosts={hosts}): use at least one rank, and a number that the hosts divide evenly")
    _check(algorithm, timeout)
    _check_world(algorithm, n)
    world = LocalWorld(n)
    store: Any = dist.HashStore()  # its type lacks multi_set, the object has it
    results: list[Any] = [None] * n
    errors: list[tuple[int, BaseException]] = []

    def play(rank: int) -> None:
        watch = Watch(rank, n, store, store, timeout=timeout, store_rank=None)
        members = Members("world", tuple(range(n)), rank, tuple(f"host {r * hosts // n}" for r in range(n)))
        comm = Communicator(Connection(members, LocalTransport(world, rank), Issuer(timeout, watch), watch, algorithm))
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
        # a rank's own error says more than the CommunicationErrors that it caused on the others
        raise next((error for _, error in errors if not isinstance(error, CommunicationError)), errors[0][1])
    return results


def _alone(algorithm: Schedule | None, timeout: float) -> Communicator:
    members = Members("world", (0,), 0, (host_key(),))
    return Communicator(Connection(members, LocalTransport(LocalWorld(1), 0), Issuer(timeout, None), None, algorithm))


def _check(algorithm: Schedule | None, timeout: float) -> None:
    if algorithm is not None and not isinstance(algorithm, Schedule):
        raise TypeError(f"algorithm must be a Schedule such as phalanx.torus(2, 4), or None; got {type(algorithm).__name__}")
    check_timeout(timeout)


def _check_elastic(elastic: bool, least: int, most: int | None, backend: str | None) -> None:
    check_ranks(least, most)
    if not elastic and (least != 1 or most is not None):
        raise ValueError("min_ranks and max_ranks are for elastic=True")
    if elastic and backend not in (None, "gloo"):
        raise ValueError(f"backend={backend!r}: with elastic=True ranks of several hosts talk over gloo; leave backend out")


def _check_world(algorithm: Schedule | None, world: int) -> None:
    if algorithm is not None:
        check_all_reduce(algorithm, world, "this job")

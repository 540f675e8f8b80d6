"""A running job and a stranger who can reach its ports: he is not believed, and the job neither stops nor grows."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import os
import pickle
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from tests.world.pool import Pool
from tests.world.programs.listening import listeners

import phalanx
import phalanx.data

IDLE = 1000  # connections per port, or what the limit of descriptors allows


# ---- what listens --------------------------------------------------------------------------------------------------------------


def where_it_listens(comm, wildcard: bool) -> list[tuple[str, int]]:
    line = comm.hotline(lambda question: {})
    with contextlib.ExitStack() as control:
        if wildcard:
            control.enter_context(socket.create_server(("", 0)))
        found = listeners(os.getpid())
        comm.barrier()
    line.close()
    return found


def test_a_job_on_one_host_listens_on_loopback_alone(pair):
    for found in pair.run(where_it_listens, False):
        assert found
        assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found


def test_negative_control_a_listener_on_all_addresses_is_seen(pair):
    for found in pair.run(where_it_listens, True):
        assert "0.0.0.0" in [address for address, _ in found]


# ---- a stranger at the ports of a running job ----------------------------------------------------------------------------------


def port_of(comm) -> int:
    return int(os.environ["MASTER_PORT"])


def march(comm, seconds: float) -> tuple[int, list[str]]:
    """Reduce numbers for so long; how often, and what was logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    line = comm.hotline(lambda question: {"rank": comm.rank})
    until, number = time.monotonic() + seconds, 0
    while comm.all_reduce(torch.tensor([float(time.monotonic() < until)]), "max").item():
        number += 1
        for x in (torch.full((3,), float(number)), torch.full((100_000,), float(number))):
            assert comm.all_reduce(x)[-1].item() == number * comm.size
        assert comm.allgather_obj(number) == [number] * comm.size
        assert line.ask({1 - comm.rank: {}}, 20.0).words[1 - comm.rank]["rank"] == 1 - comm.rank
        time.sleep(0.02)
    line.close()
    logging.getLogger("phalanx").removeHandler(handler)
    return number, told


def leave(comm) -> float:
    begun = time.monotonic()
    comm.close()
    return time.monotonic() - begun


@pytest.fixture
def job() -> Iterator[Pool]:
    """Two ranks of a job of their own: nobody wants it afterwards."""
    made = Pool(2)
    yield made
    made.kill()


def forge(port: int) -> None:
    """Alarms, verdicts, ends and all else that a rank reads: invented, and copied from what ranks have written elsewhere."""
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=20), wait_for_workers=False)
    watch = "phalanx/watch/0/0"
    true = store.get(f"{watch}/host/0")
    names = [f"{name}/{rank}" for name in ("alarm", "again", "ended", "gone", "state", "process", "host") for rank in range(2)]
    for name in ("alarm", "verdict", "ended", *names):
        store.set(f"{watch}/{name}", true if name.startswith("alarm/") else "rank 0 raised SystemExit")
    for number in range(1000):
        store.set(f"{watch}/stranger/{number}", "x" * 100)


def test_forged_keys_change_nothing(job):
    port = job.run(port_of)[0]
    with ThreadPoolExecutor(1) as pool:
        marched = pool.submit(job.run, march, 2.0, deadline=60)
        time.sleep(0.5)
        forge(port)
        told = marched.result()
    assert told[0][0] == told[1][0] > 10
    for _, messages in told:
        assert len([text for text in messages if "no rank of this job wrote it" in text]) == 1, messages
    assert max(job.run(leave)) < 15  # and it ends as it would have ended


def descriptors(job: Pool) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in job.pids]


def ports_of(job: Pool) -> set[int]:
    return {port for pid in job.pids for _, port in listeners(pid)}


def test_idle_connections_change_nothing_and_are_given_back(job):
    job.run(march, 0.1)
    store, before, others = job.run(port_of)[0], descriptors(job), ports_of(job)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as idle:
        marched = pool.submit(job.run, march, 2.5, deadline=90)
        until = time.monotonic() + 30
        while len(hotlines := ports_of(job) - others) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        ports = [store, *hotlines]
        assert len(ports) == 3
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - max(before) - 200
        for port in ports * min(IDLE, room // len(ports)):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        during = descriptors(job)
        told = marched.result()
    assert told[0][0] == told[1][0] > 3
    assert during[0] > before[0] + 100  # they were there
    until = time.monotonic() + 30
    while (after := descriptors(job)) > before and time.monotonic() < until:
        time.sleep(0.1)
    assert after <= before
    # gloo does not close what never says who it is until its group is destroyed: descriptors are not counted here
    with contextlib.ExitStack() as idle:
        gloo = others - {store}
        for port in list(gloo) * min(IDLE, room // len(gloo)):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        assert job.run(march, 0.5, deadline=60)[0][0] > 1
    assert max(job.run(leave)) < 15


# ---- nothing is unpickled ------------------------------------------------------------------------------------------------------


def without_unpickling(comm, folder: str) -> None:
    """All that Phalanx does with a network and with files, where whoever unpickles gets an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("somebody unpickles")

    import _pickle

    class Refused(pickle.Unpickler):  # torch makes subclasses of it when it is imported
        __init__ = refuse

    mutants = {"loads": refuse, "load": refuse, "Unpickler": Refused}
    kept = [(module, name, getattr(module, name)) for module in (pickle, _pickle) for name in mutants]
    for module, name, _ in kept:
        setattr(module, name, mutants[name])
    try:
        with pytest.raises(AssertionError, match="unpickles"):  # negative control
            pickle.loads(pickle.dumps(1))
        with phalanx.create_communicator(timeout=20) as made:
            use(made, folder)
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def use(comm, folder: str) -> None:
    n, rank = comm.size, comm.rank
    objects = [{"a": [1, None, "x"], "b": b"bytes"}, "word"]
    assert comm.all_reduce(torch.ones(3)).sum().item() == 3 * n
    assert comm.bcast(torch.full((2,), float(rank)), root=0).sum().item() == 0
    assert len(comm.allgather(torch.ones(2))) == n
    assert comm.allgather_obj(rank) == list(range(n))
    assert comm.bcast_obj(objects if rank == 0 else None, root=0)[1] == "word"
    assert comm.split(0).all_reduce(torch.ones(1)).item() == n
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimizer = phalanx.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), comm)
    data = phalanx.data.open("digits", "train")
    with phalanx.data.Loader(data, comm, batch=64, seed=0) as loader:
        for _, (x, y) in zip(range(3), loader):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.view(len(x), -1).float()), y).backward()
            optimizer.step()
    with phalanx.Checkpointer(folder, comm) as checkpoints:
        checkpoints.save(3, model=model, optimizer=optimizer)
        checkpoints.wait()
        assert checkpoints.load(model=model, optimizer=optimizer) == 3


def test_nothing_is_unpickled(pair, tmp_path):
    pair.run(without_unpickling, str(tmp_path), deadline=60)

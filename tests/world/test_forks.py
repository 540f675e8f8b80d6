"""A forked child has its parent's communicator in its memory: it cannot use it, and dropping it does the parent no harm."""

import gc
import os
import signal
import sys
import time
import warnings

import pytest
import torch
from tests.world.test_reductions import LARGE, equal

import phalanx


def in_a_child(work, end=os._exit):
    """What `work()` returns, as text, or its error; `end` is how the child ends."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(20)
        try:
            text = str(work())
        except BaseException as error:  # noqa: BLE001  told to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os.close(writing)
        end(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return words, os.waitstatus_to_exitcode(status)


def error_of(verb):
    try:
        verb()
    except RuntimeError as error:
        return str(error)
    return "no error"


def use_in_a_child(comm):
    n, r = comm.size, comm.rank
    child = comm.split(0)
    pending = comm.all_reduce_async(torch.ones(4))
    pending.wait()
    buffer = comm.buffer(1000)
    verbs = [
        lambda: comm.all_reduce(torch.full((2,), 1000.0)),
        lambda: comm.all_reduce(torch.full((LARGE,), 1000.0)),
        lambda: comm.all_reduce(buffer),
        lambda: comm.all_reduce_async(torch.ones(2)),
        lambda: comm.reduce_scatter(torch.ones(n)),
        lambda: comm.bcast(torch.ones(2)),
        lambda: comm.allgather_obj(1),
        lambda: comm.send(torch.ones(1), (r + 1) % n) if n > 1 else comm.barrier(),
        lambda: comm.run(phalanx.ring(n), torch.ones(3)),
        lambda: comm.buffer(3) if comm.shares_memory else comm.barrier(),
        lambda: comm.split(0),
        lambda: child.all_reduce(torch.ones(3)),
        lambda: comm.survivors(range(n)).barrier(),
        comm.barrier,
        pending.wait,
    ]

    words, status = in_a_child(lambda: "\n".join(error_of(verb) for verb in verbs))
    equal(comm.all_reduce(torch.full((2,), float(r))), torch.full((2,), float(sum(range(n)))))
    assert status == 0
    for line in words.splitlines():
        assert f"belongs to process {os.getpid()}" in line
        assert "create a communicator after the fork" in line
    assert len(words.splitlines()) == len(verbs)
    comm.barrier()


def test_a_forked_child_gets_an_error_that_names_the_remedy(world):
    world.run(use_in_a_child)


@pytest.mark.parametrize("env", [{"PHALANX_NATIVE": "0"}])
def test_so_it_is_without_shared_memory(pools, env):
    pools.of(2, **env).run(use_in_a_child)


def drop_in_a_child(comm):
    """The child closes and drops all it has, and ends in one way and the other; the parents communicate meanwhile and after."""
    n, r = comm.size, comm.rank
    child = [comm.split(0)]
    x = child[0].buffer(1000)
    x.fill_(r)

    def drop():
        child[0].close()
        child.clear()
        comm.close()
        gc.collect()
        return "dropped"

    for end in (os._exit, sys.exit) if r else (os._exit,):  # rank 0 has the store's threads, which a child does not
        try:
            assert in_a_child(drop, end)[0] == "dropped"
        except SystemExit:
            os._exit(0)  # the child itself: pytest's pool must not go on in it
        time.sleep(0.05)
    equal(child[0].all_reduce(x), torch.full((1000,), float(sum(range(n)))))
    equal(comm.all_reduce(torch.ones(LARGE)), torch.full((LARGE,), float(n)))
    assert comm.allgather_obj(r) == list(range(n))
    child[0].close()


def test_a_child_that_closes_and_drops_it_does_no_harm(world):
    world.run(drop_in_a_child)


def test_ranks_that_are_threads_are_no_children():
    def talk(comm):
        return comm.all_reduce(torch.ones(1)).item()

    assert phalanx.run_local(2, talk) == [2.0, 2.0]

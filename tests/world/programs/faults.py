"""A rank that misbehaves as it is told, `faults.py SCENARIO '{"argument": value}'`, and says in JSON lines what it learns."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import time

import torch

import phalanx
import phalanx.data
import phalanx.train.checkpoint.write

LARGE = 1 << 16  # elements: more than what counts as a small message, so that the schedule runs


def say(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, "at": time.monotonic(), **facts}), flush=True)


def attempt(call, **facts: object) -> phalanx.CommunicationError | None:
    """Make the call and say how it ended."""
    start = time.monotonic()
    try:
        call()
    except phalanx.CommunicationError as error:
        say("error", text=str(error), operation=error.operation, missing=error.missing, took=time.monotonic() - start, **facts)
        return error
    say("done", took=time.monotonic() - start, **facts)
    return None


def start(timeout: float, **options) -> phalanx.Communicator:
    comm = phalanx.create_communicator(timeout=timeout, **options)
    comm.all_reduce(torch.ones(LARGE))
    say("ready", rank=comm.rank, size=comm.size)
    return comm


def busy(how: str, comm: phalanx.Communicator) -> None:
    """What the innocent ranks do meanwhile; none of it ends by itself."""
    if how == "all_reduce":
        comm.all_reduce(torch.ones(LARGE))
    elif how == "foreign":  # code that holds no lock of Python's, does not end, and heeds no signal
        lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        for _ in range(2):  # a mutex that its owner locks once more
            libc.pthread_mutex_lock(lock)
    else:
        try:
            total, begun = 0, time.monotonic()
            while how == "loop":
                total = (total * 3 + 1) % 1_000_003
                if time.monotonic() > begun + 1.5:  # long enough for most; the rest of the machine has work to do
                    time.sleep(0.005)
            time.sleep(60)
        finally:
            say("finally")


def raising(who: int, others: str, timeout: float, way: str = "raise", context: bool = False) -> None:
    """Rank `who` raises, or calls sys.exit(3), after the others have begun to be `busy`."""

    def body(comm: phalanx.Communicator) -> None:
        if comm.rank != who:
            busy(others, comm)
            return
        time.sleep(0.5)
        say("raises")
        if way == "exit":
            sys.exit(3)
        raise ValueError(f"rank {who} has a reason")

    if context:
        with start(timeout) as comm:
            body(comm)
    else:
        body(start(timeout))


def last_things(name: str, seconds: float) -> None:
    """What a user wants to be done before the process ends."""
    time.sleep(seconds)
    say(name)


def tidying(who: int, others: str, timeout: float, seconds: float) -> None:
    """Rank `who` raises; all have exit handlers, a `finally` and an excepthook that take `seconds` each."""
    atexit.register(last_things, "exit handler from before", seconds)
    hook = sys.excepthook
    comm = start(timeout)
    atexit.register(last_things, "exit handler from after", seconds)
    phalanx_hook = sys.excepthook

    def slow_hook(*about) -> None:
        phalanx_hook(*about)
        last_things("excepthook", seconds)

    sys.excepthook = slow_hook
    assert hook is not phalanx_hook
    try:
        if comm.rank == who:
            time.sleep(0.5)
            say("raises")
            raise ValueError(f"rank {who} has a reason")
        busy(others, comm)
    finally:
        last_things("tidied", seconds)


def raising_together(timeout: float, seconds: float) -> None:
    """All ranks raise for reasons of their own; rank 1 takes `seconds` to tidy up first."""
    comm = start(timeout)
    try:
        raise ValueError(f"rank {comm.rank} has a reason")
    finally:
        if comm.rank == 1:
            last_things("tidied", seconds)


def rescuing(who: int, timeout: float, seconds: float) -> None:
    """Rank `who` dies; rank 0 does not catch the error, the others do, and need `seconds` to save what they have."""
    comm = start(timeout)
    if comm.rank == who:
        time.sleep(60)
    try:
        comm.all_reduce(torch.ones(LARGE))
    except phalanx.CommunicationError:
        if comm.rank == 0:
            raise
        last_things("rescued", seconds)


def saving(directory: str, timeout: float, seconds: float, others: str = "") -> None:
    """Rank 0 saves on a disk that needs `seconds`; before it is done the last rank raises, and the others are `busy`.

    Without `others` every rank has a part of its own to save, and the last one sleeps.
    """
    write_tensors = phalanx.train.checkpoint.write.write_tensors

    def slowly(*args, **kwargs):
        time.sleep(seconds)
        return write_tensors(*args, **kwargs)

    phalanx.train.checkpoint.write.write_tensors = slowly
    comm = start(timeout)
    checkpoints = phalanx.Checkpointer(directory, comm)
    state = {"model": torch.nn.Linear(100, 100)} if others else {"own": {"rank": torch.full((50,), comm.rank)}}
    checkpoints.save(1, **state)
    say("saved")
    if comm.rank == comm.size - 1:
        time.sleep(0.5)
        say("raises")
        if not others:
            time.sleep(60)
        raise ValueError("a reason")
    busy(others or "all_reduce", comm)


def interrupted(timeout: float, others: str) -> None:
    """Wait, in an operation that does not end or in `others`, for a SIGINT."""
    comm = start(timeout)
    if others == "all_reduce" and comm.rank == 2:
        time.sleep(60)
    busy(others, comm)


def handling(who: int, timeout: float, later: float = 0.0, linger: float = 0.0) -> None:
    """All but `who`, which sleeps, call all_reduce after `later` seconds, catch the error, try again, and end with code 0."""
    comm = start(timeout)
    if comm.rank == who:
        time.sleep(60)
    time.sleep(later)
    attempt(lambda: comm.all_reduce(torch.ones(LARGE)), first=True)
    attempt(lambda: comm.barrier(), first=False)
    time.sleep(linger)


def uncaught(who: int, timeout: float) -> None:
    """All but `who`, which sleeps, call all_reduce, and say when the error comes that they do not catch."""
    comm = start(timeout)
    if comm.rank == who:
        time.sleep(60)
    try:
        comm.all_reduce(torch.ones(LARGE))
    except phalanx.CommunicationError:
        say("caught")
        raise


def disagreeing(timeout: float, calls: list[str]) -> None:
    """Rank i makes call i."""
    comm = start(timeout)
    call = calls[comm.rank]
    if call.isdigit():
        attempt(lambda: comm.all_reduce(torch.ones(int(call))))
    elif call in ("float64", "int32"):
        attempt(lambda: comm.all_reduce(torch.ones(LARGE, dtype=getattr(torch, call))))
    elif call == "barrier":
        attempt(comm.barrier)
    elif call == "bcast":
        attempt(lambda: comm.bcast(torch.ones(LARGE)))
    else:
        attempt(lambda: comm.allgather_obj(comm.rank))
    if os.environ.get("PHALANX_DEBUG") == "1":  # nothing was sent: the communicator still works
        attempt(lambda: comm.all_reduce(torch.ones(LARGE)))


def marching(timeout: float, seconds: float) -> None:
    """Reduce numbers for `seconds`, and say what came out: the same whatever others do."""
    comm = start(timeout)
    x, until, number = torch.arange(LARGE) + float(comm.rank), time.monotonic() + seconds, 0
    while comm.all_reduce(torch.tensor([float(time.monotonic() < until)]), "max").item():
        number += 1
        y = x * number
        comm.all_reduce(y)
        assert y.tolist()[:3] == [number * (comm.size * i + comm.size * (comm.size - 1) / 2) for i in range(3)]
        time.sleep(0.01)
    say("marched", number=number)


def meeting(timeout: float) -> None:
    """Only create the communicator."""
    attempt(lambda: phalanx.create_communicator(timeout=timeout))


def splitting(who: list[int], timeout: float) -> None:
    """Even and odd world ranks part, in reverse order; then the world ranks in `who` sleep, and the others wait for them."""
    comm = start(timeout)
    part = comm.split(comm.rank % 2, key=-comm.rank)
    part.all_reduce(torch.ones(LARGE))
    say("split", rank=part.rank, size=part.size)
    if comm.rank in who:
        time.sleep(60)
    attempt(lambda: part.all_reduce(torch.ones(LARGE)))


def ending(timeout: float, order: list[float], close: str = "none") -> None:
    """Rank i ends order[i] seconds from now, without close() unless asked, and says when its exit handlers are through."""
    atexit.register(say, "left")  # the first to be registered is the last to run
    comm = start(timeout)
    comm.barrier()
    time.sleep(order[comm.rank])
    if close == "close":
        comm.close()
        comm.close()
    say("ends")


def crawling(timeout: float, delay: float) -> None:
    """A ring over a network on which every message of rank 1 is `delay` seconds late."""
    comm = start(timeout)
    if comm.rank == 1:
        send = torch.distributed.isend

        def late(*args, **kwargs):
            time.sleep(delay)
            return send(*args, **kwargs)

        torch.distributed.isend = late
    x = torch.ones(LARGE)
    attempt(lambda: comm.all_reduce(x))
    say("sum", right=bool((x == comm.size).all()))


def shuffling(timeout: float) -> None:
    """Samples go round, and nothing else is sent, until a neighbour is struck."""
    comm = start(timeout)
    shuffle = phalanx.data.AsyncShuffle((torch.zeros(3000, 1000), torch.zeros(3000)), comm, batch=100)

    def go_on() -> None:
        while True:
            for _ in shuffle:
                time.sleep(0.02)

    attempt(go_on)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))

"""A rank that misbehaves as it is told, `faults.py SCENARIO '{"argument": value}'`, and says in JSON lines what it learns."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time

import torch

import phalanx
import phalanx.data

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
    elif how == "loop":
        total = 0
        while True:
            total = (total * 3 + 1) % 1_000_003
    else:
        time.sleep(60)


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


def handling(who: int, timeout: float, later: float = 0.0, linger: float = 0.0) -> None:
    """All but `who`, which sleeps, call all_reduce after `later` seconds, catch the error, try again, and end with code 0."""
    comm = start(timeout)
    if comm.rank == who:
        time.sleep(60)
    time.sleep(later)
    attempt(lambda: comm.all_reduce(torch.ones(LARGE)), first=True)
    attempt(lambda: comm.barrier(), first=False)
    time.sleep(linger)


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

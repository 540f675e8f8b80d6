"""One rank of a default group of Phalanx that something happens to. Prints what it saw as one line of JSON."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.backend import register


def seen(call):
    """The error of a call."""
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        missing = getattr(error, "missing", None)
        return {"words": str(error), "missing": missing, "seconds": time.monotonic() - begin, "type": type(error).__name__}
    return None


def start(seconds: float, name: str = "store", backend: str = "phalanx") -> int:
    place, rank, size = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{place / name}", rank=rank, world_size=size, timeout=limit)
    return rank


def dies():
    rank = start(60)
    x = torch.ones(1000)
    dist.all_reduce(x)
    if rank == 1:
        os._exit(0)
    late = dist.all_reduce(x, async_op=True)
    return [seen(late.wait), seen(late.get_future().wait), seen(lambda: dist.all_reduce(x)), seen(dist.barrier)]


def is_late():
    rank = start(3)
    dist.barrier()
    if rank == 1:
        time.sleep(6)
    return [seen(lambda: dist.all_reduce(torch.ones(1)))]


def never_comes():
    if int(sys.argv[3]) == 1:
        return []
    return [seen(lambda: start(2))]


def ends():
    threads, shared = set(threading.enumerate()), set(os.listdir("/dev/shm"))
    backends = []
    for name, backend in (("a", "phalanx"), ("b", "cpu:phalanx,cuda:nccl"), ("c", "PHALANX")):
        rank = start(60, name, backend)
        x = torch.full((1000,), float(rank))
        dist.all_reduce(x, async_op=True).wait()
        part = dist.new_group([0, 1])
        dist.all_reduce(x, group=part)
        backends.append([dist.get_backend(), dist.get_backend(part), x[0].item()])
        dist.destroy_process_group()
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    files = [file for file in set(os.listdir("/dev/shm")) - shared if str(os.getpid()) in file]
    return [backends, left, files]


if __name__ == "__main__":
    register()  # torch does it where Phalanx is installed; here it is a source tree
    plays = {"dies": dies, "is_late": is_late, "never_comes": never_comes, "ends": ends}
    print(json.dumps(plays[sys.argv[1]]()), flush=True)
    os._exit(0)  # what gloo prints when it is torn down is not of interest

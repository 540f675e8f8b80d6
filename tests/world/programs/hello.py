"""A rank that tells on stdout, as one JSON line, who it is and what it got: `hello.py [own METHOD | netns NAME | train]`."""

from __future__ import annotations

import ctypes
import json
import os
import sys

import torch
import torch.distributed
from tests.world.programs.listening import listeners

import phalanx

CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Move this process to another network, as `ip netns exec` does."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def own_group(method: str) -> None:
    """What a user's script may have done before."""
    numbers = {} if method == "env://" else {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    torch.distributed.init_process_group("gloo", init_method=method, **numbers)


def main() -> None:
    what, detail = (*sys.argv[1:3], "", "")[:2]
    inherited = listeners(os.getpid())  # MPICH's proxy leaves its own open
    if what == "netns":
        enter(detail)
    if what == "own":
        own_group(detail)
    with phalanx.create_communicator(timeout=20) as comm:
        small, large = torch.full((3,), comm.rank + 1.0), torch.full((50_000,), comm.rank + 1.0)
        comm.all_reduce(small)
        comm.all_reduce(large)
        told = {
            "rank": comm.rank,
            "size": comm.size,
            "intra": [comm.intra_rank, comm.intra_size],
            "inter": [comm.inter_rank, comm.inter_size],
            "sums": sorted({*small.tolist(), *large.tolist()}),
            "gathered": comm.allgather_obj({"rank": comm.rank, "job": os.environ.get("JOB", "")}),
            "schedule": comm.schedule.name,
            "listens": sorted({address for address, port in listeners(os.getpid()) if (address, port) not in inherited}),
        }
        if what == "train":
            from tests.world.programs.train import results

            told |= {"trained": results(comm), "shares": comm.shares_memory}
    if what == "own":
        x = torch.ones(4)
        torch.distributed.all_reduce(x)  # still the user's, after close()
        told["own"] = [torch.distributed.is_initialized(), x.tolist()]
        torch.distributed.destroy_process_group()
    line = json.dumps(told) + "\n"
    os.write(1, line.encode())  # at once: the lines of several ranks must not mix


if __name__ == "__main__":
    main()

"""A rank that trains with gossip until all have done so many steps, and says in JSON lines what became of it.

gossip.py '{"steps": 600, "sleep": {"rank": 1, "at": 100, "seconds": 4}, "timeout": 20}'
"""

import json
import sys
import time

import torch

import phalanx

DEFAULTS = {"steps": 400, "sleep": None, "timeout": 30, "nap": 0.01}
STARTED = {"event": "started"}  # told after 100 steps


def train(comm, options, tell=lambda said: None):
    """Train a small network, and return what happened; `tell` is called on the way."""
    net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.BatchNorm1d(50))
    start = torch.Generator().manual_seed(0)  # of its own: ranks may be threads
    torch.nn.init.normal_(net[0].weight, std=0.1, generator=start)
    torch.nn.init.zeros_(net[0].bias)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    opt = phalanx.create_multi_node_optimizer(sgd, comm, sync=phalanx.Gossip())
    opt.follow(net)
    draw = torch.Generator().manual_seed(comm.rank)
    sleep = options["sleep"]
    own = recent = 0  # steps of this rank, and exchanges that arrived in the last twenty of all
    comm.barrier()
    while opt.steps < options["steps"]:
        x = torch.randn(8, 100, generator=draw)
        opt.zero_grad()
        (net(x) - x[:, :50]).pow(2).mean().backward()
        if own == 100:
            tell(STARTED)
        if sleep and comm.rank == sleep["rank"] and own == sleep["at"]:
            time.sleep(sleep["seconds"])
        opt.step()
        own += 1
        recent += opt.last_record is not None and opt.steps > options["steps"] - 20
        time.sleep(options["nap"])
    found = {"own": own, "steps": opt.steps, "round": opt.communication.round, "recent": recent, "missing": opt.missing}
    found["spread"] = opt.spread()
    opt.average_()
    left = opt.survivors()
    versions = left.allgather_obj(sum(p.detach().double().sum().item() for p in net.parameters()))
    return found | {"left": left.size, "versions": len(set(versions)), "finally": opt.missing}


def main():
    options = DEFAULTS | json.loads(sys.argv[1])
    torch.set_num_threads(1)
    comm = phalanx.create_communicator(timeout=options["timeout"])
    said = train(comm, options, lambda said: print(json.dumps(said), flush=True))
    print(json.dumps({"event": "done", **said}), flush=True)
    comm.close()


if __name__ == "__main__":
    main()

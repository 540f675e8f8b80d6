"""A rank that trains with gossip until all have done so many steps, and says in JSON lines what became of it.

gossip.py '{"steps": 600, "sleep": {"rank": 1, "at": 100, "seconds": 4}, "timeout": 20}'
"""

import json
import sys
import time

import torch

import phalanx

options = {"steps": 400, "sleep": None, "timeout": 30, "average": True, "exchange": "weights", "average_every": None}
options |= json.loads(sys.argv[1])
torch.set_num_threads(1)
comm = phalanx.create_communicator(timeout=options["timeout"])
phalanx.seed_everything(1)
net = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.BatchNorm1d(50))
sync = phalanx.Gossip(exchange=options["exchange"], average_every=options["average_every"])
opt = phalanx.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), comm, sync=sync)
opt.follow(net)
draw = torch.Generator().manual_seed(comm.rank)
comm.barrier()
own = recent = 0  # steps of this rank, and exchanges that arrived in the last of them
sleep = options["sleep"]
while opt.steps < options["steps"]:
    x = torch.randn(8, 100, generator=draw)
    opt.zero_grad()
    (net(x) - x[:, :50]).pow(2).mean().backward()
    if own == 100:
        print(json.dumps({"event": "started"}), flush=True)
    if sleep and comm.rank == sleep["rank"] and own == sleep["at"]:
        time.sleep(sleep["seconds"])
    before = opt.communication.round
    opt.step()
    own += 1
    recent += opt.last_record is not None and opt.steps > options["steps"] - 20
    time.sleep(0.002)
found = {"event": "done", "own": own, "steps": opt.steps, "round": opt.communication.round, "recent": recent}
found |= {"missing": opt.missing, "spread": opt.spread()}
if options["average"]:
    opt.average_()
left = opt.survivors()
versions = left.allgather_obj(sum(p.detach().double().sum().item() for p in net.parameters()))
print(json.dumps({**found, "left": left.size, "versions": len(set(versions)), "finally": opt.missing}), flush=True)
comm.close()

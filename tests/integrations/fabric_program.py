"""Ranks of tests/integrations/test_fabric.py. Asserts on every rank."""

from __future__ import annotations

import copy
import os
import sys
import tempfile

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

import phalanx
from phalanx.integrations.fabric import PhalanxStrategy

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = X.sin().sum(dim=1, keepdim=True)


def train(strategy, model, steps=6):
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    for number in range(steps):
        at = slice(8 * fabric.global_rank + 16 * (number % 4), 8 * fabric.global_rank + 16 * (number % 4) + 8)
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward((model(X[at]) - Y[at]).square().mean())
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return fabric, model, optimizer


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def equal_on_all_ranks(fabric, x):
    return bool((fabric.all_gather(x) == x).all())


torch.manual_seed(int(os.environ["RANK"]))  # rank 0's model is the one that is trained
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
theirs, ours, gossiping = (copy.deepcopy(net) for _ in range(3))
train(DDPStrategy(process_group_backend="gloo"), theirs)
fabric, _, _ = train(PhalanxStrategy(), ours)
torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-6)
assert equal_on_all_ranks(fabric, flat(ours))

fabric, model, optimizer = train(PhalanxStrategy(sync=phalanx.Gossip()), gossiping)
assert not equal_on_all_ranks(fabric, flat(gossiping)), "replicas of gossip differ while they train"
path = f"{tempfile.gettempdir()}/phalanx-fabric-{os.environ['MASTER_PORT']}.ckpt"
fabric.save(path, {"model": model, "optimizer": optimizer})
assert equal_on_all_ranks(fabric, flat(gossiping)), "saving makes them equal"
again = copy.deepcopy(net)
_, model, optimizer = train(PhalanxStrategy(sync=phalanx.Gossip()), again, steps=0)
fabric.load(path, {"model": model, "optimizer": optimizer})
assert torch.equal(flat(again), flat(gossiping))
assert optimizer.state_dict()["gossip"]["steps"] == 3

try:
    PhalanxStrategy(find_unused_parameters=True)
except TypeError as error:
    assert "find_unused_parameters" in str(error)  # noqa: PT017  no pytest in a rank
else:
    sys.exit("an option of DistributedDataParallel was taken")
fabric.barrier()
if fabric.is_global_zero:
    os.remove(path)
print("did it", flush=True)
torch.distributed.destroy_process_group()

"""Ranks of tests/integrations/test_accelerate.py. Asserts on every rank."""

from __future__ import annotations

import copy

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs, set_seed

import phalanx

# what docs/frameworks.md says of CPUs: no name but gloo, and a group that exists is used
try:
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="phalanx")])
except ValueError as error:
    assert "please use gloo" in str(error)  # noqa: PT017  no pytest in a rank
else:
    raise SystemExit("accelerate takes the name on CPUs now: say so in docs/frameworks.md")
AcceleratorState._reset_state(reset_partial_state=True)
PartialState._reset_state()

torch.distributed.init_process_group("phalanx")
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(X, X.sin().sum(dim=1, keepdim=True))


def train(model, comm, *, hook=False):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert torch.distributed.get_backend() == "phalanx"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if comm is None or hook:
        model = accelerator.prepare(model)
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if hook:
            model.register_comm_hook(comm, phalanx.ddp_hook)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = phalanx.create_multi_node_optimizer(optimizer, comm)
    optimizer, loader = accelerator.prepare(optimizer, torch.utils.data.DataLoader(DATA, batch_size=8))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


set_seed(0)
nets = [torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))]
nets += [copy.deepcopy(nets[0]) for _ in range(2)]
with phalanx.create_communicator() as comm:
    train(nets[0], None)
    train(nets[1], comm)
    train(nets[2], comm, hook=True)
flats = [torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in nets]
torch.testing.assert_close(flats[1], flats[0], rtol=1e-5, atol=1e-6)
torch.testing.assert_close(flats[2], flats[0], rtol=1e-5, atol=1e-6)
print("did it", flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()

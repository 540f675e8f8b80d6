"""One rank of benchmarks/elastic_goodput.py: the same small training run with each contender, which records every step.

    elastic_goodput_rank.py CONTENDER DIRECTORY HOST

A step takes STEP seconds on every rank, of which most are slept: the machine has fewer cores than the job has hosts. Every rank
trains its own share of a batch, so fewer ranks make a smaller batch.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch

STEP = 0.2
WIDTH = 256


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: torch.nn.Module, step: int, host: int) -> torch.Tensor:
    """Of this rank's share of a step, after the time that it takes."""
    time.sleep(STEP)
    generator = torch.Generator().manual_seed(1000 * step + host)
    return torch.nn.functional.cross_entropy(model(torch.randn(8, 64, generator=generator)), torch.zeros(8, dtype=torch.int64))


class Record:
    """What this process has done, one line per step that counts."""

    def __init__(self, directory: Path, host: int) -> None:
        self._file = (directory / f"host{host}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._host = host
        self.write(kind="ready")

    def write(self, **row: object) -> None:
        self._file.write(json.dumps(row | {"host": self._host, "pid": os.getpid(), "at": time.time()}) + "\n")

    def step(self, step: int, ranks: int) -> None:
        self.write(kind="step", step=step, ranks=ranks)


def ours(record: Record, host: int, directory: Path) -> None:
    import phalanx

    comm = phalanx.create_communicator(elastic=True, timeout=30.0)
    model, inner = build()
    opt = phalanx.create_multi_node_optimizer(inner, comm)
    opt.share(model=model)
    while True:
        opt.zero_grad()
        loss_of(model, opt.steps, host).backward()
        opt.step()
        record.step(opt.steps - 1, len(comm.contributors))


def torchft(record: Record, host: int, directory: Path) -> None:
    """As the example of torchft 0.2 does, with its time limits for a process that waits for another."""
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    model, inner = build()
    address = os.environ["OWN_ADDRESS"]
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    seconds = datetime.timedelta(seconds=float(os.environ.get("TORCHFT_SECONDS", "10")))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"host{host}",
        timeout=seconds,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        hostname=address,
    )
    opt = Optimizer(manager, inner)
    params = list(model.parameters())
    while True:
        before = manager.current_step()
        opt.zero_grad()
        loss_of(model, before, host).backward()
        # not its DistributedDataParallel, which asserts after a failure where gradients are on the CPU: one call for all of them
        flat = torch.cat([p.grad.flatten() for p in params])
        manager.allreduce(flat).wait()
        for p, mean in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(mean.view_as(p))
        opt.step()
        if manager.current_step() > before:
            record.step(before, manager.num_participants())


def torchrun(record: Record, host: int, directory: Path) -> None:
    """All ranks start again after a death, and continue from a checkpoint of every 10 steps."""
    import phalanx

    comm = phalanx.create_communicator(timeout=30.0)
    model, inner = build()
    opt = phalanx.create_multi_node_optimizer(inner, comm)
    checkpoints = phalanx.Checkpointer(directory / "checkpoints", comm, keep=2)
    step = checkpoints.load(model=model, opt=opt) or 0
    while True:
        opt.zero_grad()
        loss_of(model, step, host).backward()
        opt.step()
        step += 1
        record.step(step - 1, comm.size)
        if step % 10 == 0:
            checkpoints.save(step, model=model, opt=opt)


if __name__ == "__main__":
    contender, place, number = sys.argv[1:4]
    torch.set_num_threads(1)
    {"ours": ours, "torchft": torchft, "torchrun": torchrun}[contender](
        Record(Path(place), int(number)), int(number), Path(place)
    )

"""One rank of benchmarks/elastic_goodput.py: the same small training run with each contender, which records every step.

    elastic_goodput_rank.py CONTENDER DIRECTORY HOST

A step takes STEP seconds on every rank, of which most are slept: the machine has fewer cores than the job has hosts. Every rank
trains its own share of a batch, so fewer ranks make a smaller batch. Phalanx deals the samples with its Loader. With the others
they depend on the step and the host only.
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
SHARE, SAMPLES = 8, 4096  # of a rank in a step; of an epoch


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of these samples, after the time that a step takes."""
    time.sleep(STEP)
    x = torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(sum(ids.tolist())))
    return torch.nn.functional.cross_entropy(model(x), torch.zeros(len(ids), dtype=torch.int64))


def share_of(step: int, host: int, hosts: int = 4) -> torch.Tensor:
    return (torch.arange(SHARE) + SHARE * (hosts * step + host)) % SAMPLES


class Record:
    """What this process has done, one line per step that counts."""

    def __init__(self, directory: Path, host: int) -> None:
        self._file = (directory / f"host{host}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._host = host
        self.write(kind="ready")

    def write(self, **row: object) -> None:
        self._file.write(json.dumps(row | {"host": self._host, "pid": os.getpid(), "at": time.time()}) + "\n")

    def took(self, step: int, ids: torch.Tensor, **more: object) -> None:
        self.write(kind="took", step=step, ids=ids.tolist(), **more)

    def step(self, step: int, ranks: int, **more: object) -> None:
        self.write(kind="step", step=step, ranks=ranks, **more)


def ours(record: Record, host: int, directory: Path, *, gossip: bool = False) -> None:
    import phalanx

    comm = phalanx.create_communicator(elastic=True, timeout=30.0)
    model, inner = build()
    opt = phalanx.create_multi_node_optimizer(inner, comm, sync=phalanx.Gossip() if gossip else phalanx.AllReduce())
    samples = torch.arange(SAMPLES)
    loader = phalanx.data.Loader((samples, samples), comm, batch=4 * SHARE, last="keep", on_change="keep_share", workers=0)
    opt.share(model=model, loader=loader)

    def exchanged() -> dict[str, object]:
        about = {"exchanges": comm.exchanges, "contributors": comm.contributors, "in_flight": comm.in_flight}
        return about | {"member": comm.member, "epoch": loader.position.epoch}

    while True:
        for ids, _ in loader:
            record.took(opt.steps, ids, **exchanged())
            opt.zero_grad()
            loss_of(model, ids).backward()
            opt.step()
            record.step(opt.steps - 1, comm.size if gossip else len(comm.contributors), **exchanged())


def gossip(record: Record, host: int, directory: Path) -> None:
    ours(record, host, directory, gossip=True)


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
        record.took(before, ids := share_of(before, host))
        opt.zero_grad()
        loss_of(model, ids).backward()
        # not its DistributedDataParallel, which asserts after a failure where gradients are on the CPU: one call for all of them
        flat = torch.cat([p.grad.flatten() for p in params])
        manager.allreduce(flat).wait()
        for p, mean in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(mean.view_as(p))
        opt.step()
        if manager.current_step() == before + 1:
            record.step(before, manager.num_participants())
        elif manager.current_step() > before:  # it got the others' state, and its own gradients do not count
            record.write(kind="healed", step=before)


def torchrun(record: Record, host: int, directory: Path) -> None:
    """All ranks start again after a death, and continue from a checkpoint of every 10 steps."""
    import phalanx

    comm = phalanx.create_communicator(timeout=30.0)
    model, inner = build()
    opt = phalanx.create_multi_node_optimizer(inner, comm)
    checkpoints = phalanx.Checkpointer(directory / "checkpoints", comm, keep=2)
    step = checkpoints.load(model=model, opt=opt) or 0
    while True:
        record.took(step, ids := share_of(step, host))
        opt.zero_grad()
        loss_of(model, ids).backward()
        opt.step()
        step += 1
        record.step(step - 1, comm.size)
        if step % 10 == 0:
            checkpoints.save(step, model=model, opt=opt)


if __name__ == "__main__":
    contender, place, number = sys.argv[1:4]
    torch.set_num_threads(1)
    {"ours": ours, "gossip": gossip, "torchft": torchft, "torchrun": torchrun}[contender](
        Record(Path(place), int(number)), int(number), Path(place)
    )
